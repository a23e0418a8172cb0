// What finished: over time, by how it ended, how long it waited and ran; the list, and one of it beside the list.
import { S, ask } from "./store.js";
import { R, href, setQuery } from "./router.js";
import { parts } from "./parts.js";
import { Bars, Curves } from "./charts.js";
import { ending } from "./words.js";
import { clock, count, csvCell, day, duration, iso, percent, rate, shortId, tokens } from "./format.js";

const RANGES = { "15m": ["15 min", 900e3], "1h": ["1 h", 3600e3], "6h": ["6 h", 6 * 3600e3], "24h": ["24 h", 86400e3], "7d": ["7 d", 7 * 86400e3] };
const FILTERS = ["pool", "ending", "endpoint", "gateway", "producer", "model", "error", "request", "wait", "run"];
const ENDINGS = ["succeeded", "failed", "expired", "cancelled", "producer_gone", "lost", "dead", "rejected", "malformed", "reply_dropped"];
const KINDS = [["succeeded", "succeeded", "work"], ["broke", "broke", "broken"], ["late", "too late", "hold"], ["left", "caller left", "grey"]];

export const History = {
  components: { ...parts, Bars, Curves },
  data: () => ({ facts: null, rows: null, cursor: "", shares: null, problem: "", kind: "", asOf: null, follow: false, more: false, table: false, busy: false }),
  computed: {
    S: () => S,
    R: () => R,
    ranges: () => RANGES,
    endings: () => ENDINGS,
    kinds: () => KINDS,
    last: () => (R.query.since ? "" : R.query.last || "1h"),
    off() {
      return this.kind === "HistoryOff";
    },
    extra() {
      return this.more || ["producer", "model", "error", "wait", "run"].some((name) => R.query[name]);
    },
    total() {
      return this.facts?.total;
    },
    ended() {
      return this.total ? Object.values(this.total.endings).reduce((a, b) => a + b, 0) : 0;
    },
    good() {
      return this.total?.endings.succeeded || 0;
    },
    broke() {
      const e = this.total?.endings || {};
      return (e.failed || 0) + (e.dead || 0) + (e.lost || 0) + (e.malformed || 0);
    },
    used() {
      const sum = { input: 0, output: 0, reported: 0, requests: 0 };
      for (const one of this.facts?.tokens || []) {
        sum.input += one.input_tokens;
        sum.output += one.output_tokens;
        sum.reported += one.reported;
        sum.requests += one.requests;
      }
      return sum;
    },
    seconds() {
      return this.facts ? (this.facts.until_ms - this.facts.since_ms) / 1000 : 1;
    },
    onePool() {
      return (R.query.pool || "").split(",").filter(Boolean).length === 1;
    },
    series() {
      const found = [["wait", "hold", "wait"], ["run", "work", "run"]];
      return this.onePool ? [...found, ["wait50", "hold", "wait p50", true], ["run50", "work", "run p50", true]] : found;
    },
    marks() {
      const found = [];
      for (const row of Object.values(S.events)) {
        if (!this.facts || row.at_ms < this.facts.since_ms || row.at_ms > this.facts.until_ms) continue;
        const f = row.facts || {};
        if (row.kind === "breaker" && f.to === "open" && f.from !== "half_open") found.push([row.at_ms, `${f.endpoint} breaker open`]);
        else if (row.kind === "pause") found.push([row.at_ms, `${f.pool} paused`]);
        else if (row.kind === "config") found.push([row.at_ms, `generation ${f.generation}`]);
      }
      return found.sort((a, b) => a[0] - b[0]).slice(-4);
    },
    scale() {
      return Math.max(1, ...(this.rows || []).map((row) => (row.queue_wait_ms || 0) + (row.execution_ms || 0)));
    },
    chosen() {
      return (this.rows || []).find((row) => row.request_id === R.query.sel) || null;
    },
    jain() {
      const steps = this.shares?.steps || [];
      return steps.map((step) => ({ at: step.start_ms, jain: step.jain }));
    },
  },
  watch: {
    "R.query": {
      deep: true,
      handler(now, before) {
        const of = (query) => JSON.stringify({ ...query, sel: "" });
        if (this.asked !== of(now)) {
          this.asked = of(now);
          clearTimeout(this.soon);
          this.soon = setTimeout(() => this.fetch(), 200);
        }
      },
    },
  },
  created() {
    this.asked = JSON.stringify({ ...R.query, sel: "" });
    this.fetch();
    this.timer = setInterval(() => this.follow && !document.hidden && this.fetch(), 10_000);
  },
  unmounted() {
    clearInterval(this.timer);
  },
  methods: {
    href, clock, count, day, duration, ending, iso, percent, rate, shortId, tokens,
    args() {
      const now = Math.ceil(S.now);
      const until = Number(R.query.until) || now;
      const since = Number(R.query.since) || until - (RANGES[R.query.last] || RANGES["1h"])[1];
      const found = { since_ms: Math.floor(since), until_ms: until };
      for (const name of FILTERS) if (R.query[name]) found[name] = R.query[name];
      return found;
    },
    async fetch() {
      const args = this.args();
      this.busy = true;
      try {
        const [facts, list] = await Promise.all([ask("history", args), ask("history_list", args)]);
        this.facts = facts;
        this.rows = list.rows;
        this.cursor = list.cursor;
        this.asOf = args.until_ms;
        this.problem = this.kind = "";
        this.shares = await ask("history_shares", args);
      } catch (error) {
        this.problem = error.message;
        this.kind = error.kind;
      }
      this.busy = false;
    },
    async next() {
      try {
        const list = await ask("history_list", { ...this.args(), until_ms: this.asOf, cursor: this.cursor });
        this.rows = [...this.rows, ...list.rows];
        this.cursor = list.cursor;
      } catch (error) {
        this.problem = error.message;
      }
    },
    range: (last) => setQuery({ last: last === "1h" ? "" : last, since: "", until: "" }),
    set: (name, value) => setQuery({ [name]: value }),
    clear: () => setQuery(Object.fromEntries(FILTERS.map((name) => [name, ""]))),
    choose(row) {
      setQuery({ sel: R.query.sel === row.request_id ? "" : row.request_id }, { push: !R.query.sel });
    },
    close: () => setQuery({ sel: "" }),
    part(ms) {
      return { width: Math.max(ms ? 1 : 0, ((ms || 0) / this.scale) * 100) + "%" };
    },
    whose(row) {
      if (row.ending === "succeeded") return "";
      const took = row.execution_ms === null ? "" : ` after ${duration(row.execution_ms)}`;
      return {
        failed: `The endpoint ${row.status ? "answered " + row.status : "failed"}${took}. The endpoint failed, not dispatch.`,
        expired: row.execution_ms === null ? "Its deadline passed while it waited; it never ran." : "Its deadline passed while it ran.",
        cancelled: "Its caller or an operator cancelled it.",
        producer_gone: "Its caller went away: its liveness key was not refreshed.",
        lost: "Its gateway died holding it; delivery is at_most_once.",
        dead: `${row.attempt} attempts were spent.`,
        rejected: "It was refused before it was queued.",
      }[row.ending] || "";
    },
    csv() {
      const names = ["ended_ms", "request_id", "pool_id", "ending", "error_type", "status", "queue_wait_ms", "execution_ms", "delivery_ms", "input_tokens", "output_tokens", "gateway_id", "endpoint_id", "model", "producer_id", "attempt", "cost_units", "trace_id"];
      const text = [names.join(","), ...(this.rows || []).map((row) => names.map((name) => csvCell(name === "ended_ms" ? iso(row[name]) : row[name])).join(","))].join("\n");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = `history-${S.group}.csv`;
      link.click();
      URL.revokeObjectURL(link.href);
    },
    async copyLink() {
      const query = { ...R.query, last: "", since: this.facts?.since_ms, until: this.facts?.until_ms };
      await navigator.clipboard?.writeText(location.origin + href("history", "", query)).catch(() => {});
    },
  },
  template: `
<h1 class="hide" tabindex="-1">History of {{ S.group }}</h1>
<div class="page-head"><span class="choice" role="group" aria-label="Range"><button v-for="([word], key) in ranges" :key="key" :aria-pressed="last === key" @click="range(key)">{{ word }}</button></span>
<label class="pick">Pool <select :value="R.query.pool || ''" @change="set('pool', $event.target.value)"><option value="">any</option><option v-for="(_, id) in S.pools" :key="id" :value="id">{{ id }}</option></select></label>
<label class="pick">Ending <select :value="R.query.ending || ''" @change="set('ending', $event.target.value)"><option value="">any</option><option v-for="word in endings" :key="word" :value="word">{{ word.replaceAll('_', ' ') }}</option></select></label>
<label class="pick wide">Endpoint <select :value="R.query.endpoint || ''" @change="set('endpoint', $event.target.value)"><option value="">any</option><option v-for="(_, id) in S.endpoints" :key="id" :value="id">{{ id }}</option></select></label>
<label class="pick wide">Gateway <select :value="R.query.gateway || ''" @change="set('gateway', $event.target.value)"><option value="">any</option><option v-for="(_, id) in S.gateways" :key="id" :value="id">{{ id }}</option></select></label>
<button class="wide" v-if="!extra" @click="more = true">+ Filter</button><span class="push"></span>
<label class="find"><icon name="search" :size="14"></icon><span class="hide">Request id</span><input type="search" placeholder="Request id" :value="R.query.request || ''" @change="set('request', $event.target.value.trim())" autocomplete="off"><kbd>f</kbd></label>
<button :aria-pressed="follow" class="toggle" @click="follow = !follow">Follow</button><button class="wide" @click="copyLink">Copy link</button><button class="wide" @click="csv">CSV</button></div>
<div v-if="extra" class="page-head"><label v-for="[name, word] in [['producer', 'Producer'], ['model', 'Model'], ['error', 'Error'], ['wait', 'Wait over, ms'], ['run', 'Run over, ms']]" :key="name" class="pick">{{ word }} <input :value="R.query[name] || ''" @change="set(name, $event.target.value.trim())" :inputmode="name === 'wait' || name === 'run' ? 'numeric' : 'text'"></label><button class="quiet link" @click="clear">Clear filters</button></div>
<section v-if="off" class="panel empty-page"><p>{{ problem }}</p><p class="dim">Start Studio with <code>--history URL</code>, or set <code>DISPATCH_HISTORY_URL</code>. Live pages are not affected.</p></section>
<template v-else>
<p v-if="problem" class="problem" role="alert">{{ problem }} Live pages are not affected.</p>
<p v-if="!facts && !problem" class="empty">Reading the history…</p>
<div v-if="facts" class="past" :class="{ old: problem }">
<section class="panel totals six" aria-label="Totals of the range">
  <div class="total"><h2>Finished</h2><p class="figure"><b>{{ count(ended) }}</b></p><p class="sub">{{ rate(total.per_second) }} on average</p></div>
  <div class="total"><h2>Succeeded</h2><p class="figure"><b>{{ ended ? percent(good / ended).replace(' %', '') : '–' }}</b><span v-if="ended">%</span></p><p class="sub"><b>{{ count(broke) }}</b> broke · <b>{{ count(ended - good - broke) }}</b> other endings</p></div>
  <div class="total"><h2>Wait</h2><p class="figure"><b v-if="total.queue_wait"><dur :ms="total.queue_wait.p95"></dur></b><b v-else class="unk small">–</b><span>p95</span></p><p class="sub" v-if="total.queue_wait"><template v-if="onePool">p50 <dur :ms="total.queue_wait.p50"></dur> · </template>p99 <dur :ms="total.queue_wait.p99"></dur></p></div>
  <div class="total"><h2>Run</h2><p class="figure"><b v-if="total.execution"><dur :ms="total.execution.p95"></dur></b><b v-else class="unk small">–</b><span>p95</span></p><p class="sub" v-if="total.execution"><template v-if="onePool">p50 <dur :ms="total.execution.p50"></dur> · </template>p99 <dur :ms="total.execution.p99"></dur></p></div>
  <div class="total"><h2>Tokens in</h2><p class="figure"><b v-if="used.reported" :title="count(used.input)">{{ tokens(used.input) }}</b><b v-else class="unk small">unknown</b></p><p class="sub">reported by {{ used.requests ? percent(used.reported / used.requests) : '–' }} of replies</p></div>
  <div class="total"><h2>Tokens out</h2><p class="figure"><b v-if="used.reported" :title="count(used.output)">{{ tokens(used.output) }}</b><b v-else class="unk small">unknown</b></p><p class="sub" v-if="used.reported">{{ tokens(used.output / seconds) }}/s on average</p></div>
</section>
<div class="charts">
  <panel :title="'Endings per ' + duration(facts.step_ms)"><template #side><span class="legend"><span v-for="[key, word, tone] in kinds" :key="key" :class="'t-' + tone">{{ word }}</span></span></template><bars :steps="facts.steps" :from="facts.since_ms" :to="facts.until_ms" :step="facts.step_ms" :kinds="kinds" :marks="marks"></bars></panel>
  <panel title="Wait and run, p95" :note="onePool ? 'log scale' : 'of the slowest pool, log scale'"><template #side><span class="legend"><span class="t-hold">wait</span><span class="t-work">run</span></span><button class="quiet link" :aria-pressed="table" @click="table = !table">{{ table ? 'Show as chart' : 'Show as table' }}</button></template>
    <curves v-if="!table" :steps="facts.steps" :from="facts.since_ms" :to="facts.until_ms" :series="series" log></curves>
    <div v-else class="scroll short"><table><caption class="hide">Endings, wait and run over time</caption><thead><tr><th>From</th><th class="r">Succeeded</th><th class="r">Broke</th><th class="r">Too late</th><th class="r">Caller left</th><th class="r">Wait p95</th><th class="r">Run p95</th></tr></thead><tbody><tr v-for="step in facts.steps" :key="step.at"><td>{{ clock(step.at) }}</td><td class="r">{{ step.succeeded }}</td><td class="r">{{ step.broke }}</td><td class="r">{{ step.late }}</td><td class="r">{{ step.left }}</td><td class="r"><dur v-if="step.wait !== null" :ms="step.wait"></dur><template v-else>–</template></td><td class="r"><dur v-if="step.run !== null" :ms="step.run"></dur><template v-else>–</template></td></tr></tbody></table></div></panel>
</div>
<section class="panel list"><header class="panel-head"><h2>Requests</h2><span class="note">newest first · {{ count(ended) }} in range · as of {{ clock(asOf) }} UTC</span><span class="push"></span><span class="legend"><span class="t-hold">wait</span><span class="t-work">run</span><span class="t-broken">run that failed</span></span><span class="dim sub">bars share one scale, 0 to {{ duration(scale) }}</span></header>
<div class="beside"><div class="scroll"><table class="cards rows"><caption class="hide">Requests that finished</caption><thead><tr><th>Finished</th><th>Request</th><th>Pool</th><th>Ending</th><th class="wide">Wait then run</th><th class="r">Wait</th><th class="r">Run</th><th class="r">Tokens in / out</th><th>Gateway</th></tr></thead>
<tbody><tr v-for="row in rows" :key="row.request_id + '.' + row.attempt" data-row tabindex="-1" :data-id="row.request_id" :class="{ selected: R.query.sel === row.request_id }" @click="choose(row)"><td class="num" :title="iso(row.ended_ms)">{{ clock(row.ended_ms, false, true) }}</td><td><a :href="href('requests', row.request_id)" @click.stop><code :title="row.request_id">{{ shortId(row.request_id) }}</code></a></td><td><name :text="row.pool_id" :most="24"></name></td><td><icon :name="ending(row.ending).icon" :class="'t-' + ending(row.ending).tone" :size="14"></icon> {{ row.ending === 'failed' && row.error_type ? row.error_type : row.ending.replaceAll('_', ' ') }}<template v-if="row.times > 1"> × {{ count(row.times) }}</template></td><td class="wide"><span class="then" role="img" :aria-label="'wait ' + duration(row.queue_wait_ms) + ', run ' + duration(row.execution_ms)"><i class="t-hold" :style="part(row.queue_wait_ms)"></i><i v-if="row.execution_ms !== null" :class="row.ending === 'succeeded' ? 't-work' : ending(row.ending).tone === 'broken' ? 't-broken' : 't-work'" :style="part(row.execution_ms)"></i></span></td><td class="r"><dur v-if="row.queue_wait_ms !== null" :ms="row.queue_wait_ms"></dur><template v-else>–</template></td><td class="r"><dur v-if="row.execution_ms !== null" :ms="row.execution_ms"></dur><template v-else>–</template></td><td class="r"><template v-if="row.input_tokens !== null || row.output_tokens !== null">{{ tokens(row.input_tokens) }} / {{ tokens(row.output_tokens) }}</template><template v-else-if="row.execution_ms === null">–</template><span v-else class="unk">unknown</span></td><td><name v-if="row.gateway_id" :text="row.gateway_id" :most="20"></name><span v-else class="dim">never ran</span></td></tr></tbody></table>
<p v-if="rows && !rows.length" class="empty">Nothing finished in this range<template v-if="R.query.pool || R.query.ending"> that matches</template>. {{ count(S.one.totals?.in_flight) }} requests are in flight.</p><p v-if="cursor" class="pad"><button class="quiet link" @click="next">Older</button></p></div>
<aside v-if="chosen" class="drawer" aria-label="Request"><header><code :title="chosen.request_id">{{ shortId(chosen.request_id) }}</code> <span class="word" :class="'t-' + ending(chosen.ending).tone"><icon :name="ending(chosen.ending).icon" :size="14"></icon> {{ chosen.ending.replaceAll('_', ' ') }}</span><span class="push"></span><a :href="href('requests', chosen.request_id)">Open</a><button class="quiet icon" aria-label="Close" @click="close"><icon name="cross" :size="13"></icon></button></header>
<section v-if="whose(chosen)"><p class="t-broken word" v-if="chosen.error_type">{{ chosen.error_type }}</p><p class="sentence">{{ whose(chosen) }}</p></section>
<section><p class="pair"><span>Timeline</span><span class="dim">total <dur :ms="chosen.total_latency_ms"></dur></span></p><div v-for="[word, ms, tone] in [['wait', chosen.queue_wait_ms, 'hold'], ['run', chosen.execution_ms, ending(chosen.ending).tone === 'broken' ? 'broken' : 'work'], ['deliver', chosen.delivery_ms, 'grey']]" :key="word" class="phase"><span class="dim">{{ word }}</span><gauge :value="ms" :top="chosen.total_latency_ms || 1" :tone="tone" :label="word"></gauge><dur :ms="ms"></dur></div></section>
<dl class="facts"><dt>Pool</dt><dd><name :text="chosen.pool_id"></name></dd><dt>Producer</dt><dd><name :text="chosen.producer_id"></name></dd><dt>Gateway</dt><dd><template v-if="chosen.gateway_id"><name :text="chosen.gateway_id"></name></template><span v-else class="dim">never ran</span></dd><dt>Endpoint</dt><dd><name :text="chosen.endpoint_id"></name> <code class="dim">{{ chosen.backend_address }}</code></dd><dt>Model</dt><dd><name :text="chosen.model"></name></dd><dt>Messages</dt><dd>{{ count(chosen.message_count) }} <span class="dim">content is never stored</span></dd><dt>Cost</dt><dd>{{ count(chosen.cost_units) }} units</dd><dt>Attempt</dt><dd>{{ chosen.attempt }}</dd><dt>Tokens</dt><dd>{{ tokens(chosen.input_tokens) }} in, {{ tokens(chosen.output_tokens) }} out</dd><dt>Submitted</dt><dd>{{ clock(chosen.submitted_ms, false, true) }} UTC</dd><dt>Finished</dt><dd>{{ clock(chosen.ended_ms, false, true) }} UTC</dd><dt>Trace</dt><dd><copy :text="chosen.trace_id"></copy></dd></dl></aside></div></section>
<div class="three"><panel title="Fairness" note="share of cost against weight"><p v-if="shares && shares.total" class="pad">Jain’s index <b>{{ shares.total.jain === null ? 'unknown: fewer than two pools waited all along' : shares.total.jain.toFixed(3) }}</b></p><curves v-if="jain.some((one) => one.jain !== null)" :steps="jain" :from="facts.since_ms" :to="facts.until_ms" :series="[['jain', 'work', 'Jain']]" :top="1" small></curves><table v-if="shares && shares.total"><caption class="hide">Shares</caption><thead><tr><th>Pool</th><th class="r">Weight</th><th class="r">Cost</th><th class="r">Share</th><th class="r">Fair</th></tr></thead><tbody><tr v-for="one in shares.total.pools" :key="one.pool_id"><td><name :text="one.pool_id"></name></td><td class="r">{{ one.weight ?? 'unknown' }}</td><td class="r">{{ count(one.cost_units) }}</td><td class="r">{{ percent(one.share) }}</td><td class="r">{{ one.fair_share === null ? 'all it asked' : percent(one.fair_share) }}</td></tr></tbody></table></panel>
<panel title="By pool" note="p95"><table><caption class="hide">By pool</caption><thead><tr><th>Pool</th><th class="r">Finished</th><th class="r">Wait</th><th class="r">Run</th></tr></thead><tbody><tr v-for="one in facts.pools" :key="one.pool_id"><td><a :href="href('history', '', { ...R.query, pool: one.pool_id })"><name :text="one.pool_id"></name></a></td><td class="r">{{ count(one.requests) }}</td><td class="r"><dur v-if="one.queue_wait" :ms="one.queue_wait.p95"></dur><template v-else>–</template></td><td class="r"><dur v-if="one.execution" :ms="one.execution.p95"></dur><template v-else>–</template></td></tr></tbody></table></panel>
<panel title="Errors and tokens"><table v-if="facts.errors.length"><caption class="hide">Errors</caption><thead><tr><th>Error</th><th class="r">Requests</th><th class="r">Last</th></tr></thead><tbody><tr v-for="one in facts.errors" :key="one.ending + one.error_type"><td>{{ one.error_type || one.ending.replaceAll('_', ' ') }}</td><td class="r">{{ count(one.requests) }}</td><td class="r">{{ clock(one.last_ms) }}</td></tr></tbody></table><p v-else class="empty">No errors.</p><table v-if="facts.tokens.length"><caption class="hide">Tokens</caption><thead><tr><th>Model</th><th>Pool</th><th class="r">In</th><th class="r">Out</th></tr></thead><tbody><tr v-for="one in [...facts.tokens].sort((a, b) => b.requests - a.requests).slice(0, 20)" :key="one.pool_id + one.model"><td><name :text="one.model" :most="22"></name></td><td><name :text="one.pool_id" :most="22"></name></td><td class="r">{{ one.reported ? tokens(one.input_tokens) : 'unknown' }}</td><td class="r">{{ one.reported ? tokens(one.output_tokens) : 'unknown' }}</td></tr></tbody></table><p v-if="facts.tokens.length > 20" class="empty">{{ count(facts.tokens.length - 20) }} more: choose a pool or a model.</p></panel></div>
</div></template>`,
};
