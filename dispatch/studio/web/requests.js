// What runs, and one request: where it is, and what happened to it.
import { S, ask } from "./store.js";
import { R, href, setQuery } from "./router.js";
import { parts } from "./parts.js";
import { A, openDialog } from "./acts.js";
import { ending } from "./words.js";
import { bytes, clock, count, csvCell, iso } from "./format.js";

const COLUMNS = { longest: (a, b) => (a.claimed_ms || 0) - (b.claimed_ms || 0), pool: (a, b) => (a.pool < b.pool ? -1 : 1), gateway: (a, b) => (a.gateway < b.gateway ? -1 : 1), lease: (a, b) => (a.until_ms || 0) - (b.until_ms || 0), cost: (a, b) => (b.cost || 0) - (a.cost || 0) };

export const InFlight = {
  components: parts,
  data: () => ({ gone: {} }),
  computed: {
    S: () => S,
    R: () => R,
    all: () => Object.keys(S.leases).length,
    rows() {
      const text = (R.query.f || "").toLowerCase();
      const hit = (row) => !text || [row.id, row.pool, row.producer, row.gateway, row.endpoint, row.model].some((cell) => cell?.toLowerCase().includes(text));
      const by = COLUMNS[R.query.sort] || COLUMNS.longest;
      return Object.entries(S.leases).map(([id, lease]) => ({ id, ...lease })).filter(hit).sort((a, b) => by(a, b) || (a.id < b.id ? -1 : 1));
    },
  },
  methods: {
    href, count, iso,
    filter: (event) => setQuery({ f: event.target.value }),
    sort: (by) => setQuery({ sort: by === "longest" ? "" : by }),
    clear: () => setQuery({ f: "" }),
    cancel: (row) => openDialog("cancel", { id: row.id, pool: row.pool, submitted_ms: row.submitted_ms, producer: row.producer, running: true }),
    pressed: (by) => (R.query.sort || "longest") === by,
    csv() {
      const names = ["id", "pool", "producer", "gateway", "endpoint", "model", "state", "attempt", "cost", "submitted_ms", "claimed_ms", "until_ms"];
      const text = [names.join(","), ...this.rows.map((row) => names.map((name) => csvCell(name.endsWith("_ms") ? iso(row[name]) : row[name])).join(","))].join("\n");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = `in-flight-${S.group}.csv`;
      link.click();
      URL.revokeObjectURL(link.href);
    },
  },
  template: `
<header class="page-head"><h1 tabindex="-1">In flight</h1><span class="note">{{ count(S.one.totals?.in_flight) }}<template v-if="S.one.totals && all < S.one.totals.in_flight">, the {{ count(all) }} longest shown</template></span><span class="push"></span>
<label class="find"><icon name="search" :size="14"></icon><span class="hide">Filter</span><input type="search" placeholder="Filter" :value="R.query.f || ''" @input="filter" autocomplete="off"><kbd>f</kbd></label>
<span class="choice" role="group" aria-label="Sort by"><button v-for="[by, word] in [['longest', 'Longest'], ['lease', 'Lease'], ['pool', 'Pool'], ['gateway', 'Gateway'], ['cost', 'Cost']]" :key="by" :aria-pressed="pressed(by)" @click="sort(by)">{{ word }}</button></span><button class="wide" @click="csv">CSV</button></header>
<section class="panel scroll"><table class="cards"><caption class="hide">Running requests</caption><thead><tr><th>Request</th><th>Pool</th><th>Producer</th><th>Gateway</th><th>Endpoint</th><th>Model</th><th class="r">Running</th><th class="r">Lease left</th><th class="r">Attempt</th><th class="r">Cost</th><th>State</th><th><span class="hide">Acts</span></th></tr></thead>
<tbody><tr v-for="row in rows" :key="row.id" data-row tabindex="-1" :data-request="row.id"><td><a :href="href('requests', row.id)"><code><name :text="row.id" :most="14"></name></code></a></td><td><a :href="href('pools', row.pool)"><name :text="row.pool" :most="24"></name></a></td><td><name :text="row.producer" :most="20"></name></td><td><name :text="row.gateway" :most="20"></name></td><td><name :text="row.endpoint" :most="20"></name></td><td><name :text="row.model" :most="20"></name></td><td class="r strong"><age :at="row.claimed_ms"></age></td><td class="r"><age :at="row.until_ms" until></age></td><td class="r">{{ count(row.attempt) }}</td><td class="r">{{ count(row.cost) }}</td><td :class="row.state === 'cancelling' ? 't-person word' : ''">{{ row.state }}</td><td class="r"><act kind="quiet link" @act="cancel(row)">Cancel…</act></td></tr></tbody></table>
<p v-if="!all" class="empty">Nothing runs.</p><p v-else-if="!rows.length" class="empty">No request matches <b>“{{ R.query.f }}”</b>. {{ count(all) }} hidden. <button class="quiet link" @click="clear">Clear filter</button></p></section>`,
};

export const Request = {
  components: parts,
  props: { id: String },
  data: () => ({ found: null, past: null, problem: "", pastProblem: "" }),
  computed: {
    S: () => S,
    lease() {
      return S.leases[this.id];
    },
    row() {
      return this.found?.row;
    },
    over() {
      return this.past || this.found?.ended;
    },
    state() {
      const row = this.row;
      if (this.lease) return ["chevrons", "work", this.lease.state];
      if (row && row.state !== "ended") return { queued: ["hourglass", "hold", "waiting"], delayed: ["hourglass", "hold", "waits for its next attempt"], leased: ["chevrons", "work", "running"], dead: ["cross", "broken", "dead"] }[row.state] || ["dashed", "grey", row.state];
      const look = ending(row?.ending || this.over?.ending);
      return [look.icon, look.tone, look.word.replaceAll("_", " ")];
    },
    live() {
      return this.lease || (this.row && ["queued", "delayed", "leased"].includes(this.row.state));
    },
    nothing() {
      return this.found && !this.row && !this.over;
    },
    facts() {
      const r = { ...(this.over || {}), ...(this.row || {}) };
      const name = (a, b) => r[a] ?? r[b];
      return [["Pool", name("pool_id", "pool"), "pools"], ["Producer", r.detached ? "nobody waits for it" : name("producer_id", "producer")], ["Gateway", name("gateway_id", "gateway"), "gateways"], ["Endpoint", name("endpoint_id", "endpoint"), "endpoints"], ["Model", r.model], ["Messages", r.message_count === undefined ? undefined : `${count(r.message_count)}, content is never shown`], ["Body", r.body_bytes === undefined ? undefined : bytes(r.body_bytes)], ["Cost", r.cost === undefined ? undefined : `${count(r.cost)} units`], ["Attempt", r.attempt], ["Priority", r.priority], ["Fairness key", r.fairness_key], ["Input tokens", r.input_tokens], ["Output tokens", r.output_tokens], ["Chunks", r.chunks], ["Status", r.status], ["Error", r.error_type ?? r.last_error_type]].filter(([, value]) => value !== undefined && value !== null && value !== "");
    },
    // Moments in order: [when, what, detail, tone].
    line() {
      const r = { ...(this.over || {}), ...(this.row || {}) };
      const found = [];
      if (r.submitted_ms) found.push([r.submitted_ms, "Submitted", "", "grey"]);
      const tries = this.over?.tries || this.row?.tries || [];
      for (const one of tries) {
        found.push([one.claimed_ms, `Attempt ${one.attempt} began`, `on gateway ${one.gateway_id || "unknown"}`, "work"]);
        found.push([one.ended_ms, `Attempt ${one.attempt} ended`, [one.error_type, one.status && `status ${one.status}`].filter(Boolean).join(", "), "broken"]);
      }
      const claimed = this.lease?.claimed_ms || r.claimed_ms;
      if (claimed && !tries.some((one) => one.claimed_ms === claimed)) found.push([claimed, `Attempt ${this.lease?.attempt || r.attempt || 1} began`, `on gateway ${this.lease?.gateway || r.gateway_id || r.gateway || "unknown"}`, "work"]);
      const first = this.lease?.first_chunk_ms || r.first_chunk_ms;
      if (first) found.push([first, "First chunk", "", "work"]);
      if (r.ended_ms) found.push([r.ended_ms, `Ended: ${(r.ending || "unknown").replaceAll("_", " ")}`, r.error_type || "", ending(r.ending).tone]);
      if (r.delivered_ms) found.push([r.delivered_ms, "Reply delivered", "", "grey"]);
      return found.filter(([at]) => at).sort((a, b) => a[0] - b[0]);
    },
    sentence() {
      const r = this.over;
      if (!r || this.live) return "";
      return {
        succeeded: "The endpoint answered, and the reply was sent to its producer.",
        failed: "The endpoint failed, not dispatch.",
        lost: "Its gateway died holding it; delivery is at_most_once, so it was not run again.",
        dead: "Its attempts are spent. It is kept in the dead list: see dispatch dead.",
        expired: r.claimed_ms ? "Its deadline passed while it ran." : "Its deadline passed while it waited: it never ran.",
        cancelled: "It was cancelled by its caller or an operator.",
        producer_gone: "The caller stopped refreshing its liveness key: it went away.",
        malformed: "What was queued could not be read; look at the producer's version.",
      }[r.ending] || "";
    },
    running() {
      return Boolean(this.lease || this.row?.state === "leased");
    },
  },
  watch: {
    lease(now, before) {
      if (Boolean(now) !== Boolean(before)) this.fetch();
    },
  },
  created() {
    this.fetch();
    this.timer = setInterval(() => (this.live || !this.found) && !document.hidden && !A.dialog && this.fetch(), 2000);
  },
  unmounted() {
    clearInterval(this.timer);
  },
  methods: {
    href, clock, count, iso,
    async fetch() {
      try {
        this.found = await ask("request", { id: this.id });
        this.problem = "";
      } catch (error) {
        this.problem = error.message;
      }
      if (!this.live && !this.past) {
        try {
          this.past = (await ask("history_request", { id: this.id })).row;
        } catch (error) {
          this.pastProblem = error.message;
        }
      }
    },
    cancel() {
      const r = this.row || {};
      openDialog("cancel", { id: this.id, pool: r.pool_id || this.lease?.pool, submitted_ms: r.submitted_ms || this.lease?.submitted_ms, producer: r.producer_id || this.lease?.producer, running: this.running, done: () => this.fetch() });
    },
  },
  template: `
<header class="page-head"><h1 tabindex="-1">Request</h1><copy :text="id"></copy><span v-if="!nothing && found" class="word" :class="'t-' + state[1]"><icon :name="state[0]"></icon> {{ state[2] }}</span><span class="push"></span><act v-if="live" @act="cancel">Cancel…</act></header>
<p v-if="problem" class="problem" role="alert">{{ problem }}</p>
<section v-if="nothing" class="panel empty-page"><p>No trace of <code>{{ id }}</code> in Valkey or in history. Either it is older than the history, or it was never admitted, or history lost it (see <a :href="href('signals') + '#history-missing'">Signals</a>).</p><p v-if="pastProblem" class="dim">{{ pastProblem }}</p></section>
<div v-else-if="found" class="two-one">
  <panel title="Life line" note="UTC"><p v-if="sentence" class="sentence">{{ sentence }}</p><ol class="life"><li v-for="([at, what, more, tone], n) in line" :key="n" :class="'t-' + tone"><time class="num" :title="iso(at)">{{ clock(at, false, true) }}</time><span class="two"><b>{{ what }}</b><span class="sub" v-if="more">{{ more }}</span></span><span class="push"></span><span class="sub" v-if="n">+<dur :ms="at - line[n - 1][0]"></dur></span></li>
  <li v-if="running" class="t-work now"><time class="num">now</time><span class="two"><b>Running for <age :at="lease ? lease.claimed_ms : row.claimed_ms"></age></b><span class="sub" v-if="lease">lease ends in <age :at="lease.until_ms" until></age> unless its gateway renews it</span></span></li>
  <li v-else-if="live" class="t-hold now"><time class="num">now</time><span class="two"><b>Waiting for <age :at="row.submitted_ms"></age></b><span class="sub">deadline in <age :at="row.deadline_ms" until></age></span></span></li></ol></panel>
  <panel title="Facts"><dl class="facts"><template v-for="[word, value, page] in facts" :key="word"><dt>{{ word }}</dt><dd><a v-if="page" :href="href(page, value)"><name :text="String(value)" :most="36"></name></a><name v-else :text="String(value)" :most="60"></name></dd></template></dl>
  <p v-if="over && over.trace_id" class="pad">Trace <copy :text="over.trace_id"></copy></p></panel>
</div><p v-else-if="!problem" class="empty">Reading…</p>`,
};
