// The overview: what is wrong, how much, which pool and why, the backend, who runs it, who changed what.
import { S } from "./store.js";
import { href } from "./router.js";
import { parts } from "./parts.js";
import { PoolMap } from "./pool_map.js";
import { openDialog } from "./acts.js";
import { told } from "./words.js";
import { count, percent, rate, clock, duration, plural, shortId, UNKNOWN } from "./format.js";

const KINDS = { broken: ["octagon", "broken"], held: ["hourglass", "hold"], capped: ["bars", "hold"], person: ["pause", "person"], unknown: ["dashed", "grey"], note: ["alert", "grey"] };

export const Attention = {
  components: parts,
  data: () => ({ all: false }),
  computed: {
    rows() {
      return Object.entries(S.attention).map(([id, row]) => ({ id, ...row })).sort((a, b) => a.rank - b.rank);
    },
    shown() {
      return this.all ? this.rows : this.rows.slice(0, 5);
    },
    oldest() {
      const { oldest_ms, waiting } = S.one.totals || {};
      if (waiting === 0) return "Nothing waits.";
      return oldest_ms ? "" : "Oldest wait unknown.";
    },
    S: () => S,
  },
  methods: {
    look: (kind) => KINDS[kind] || KINDS.note,
    target(act) {
      switch (act?.target) {
        case "endpoint": return href("endpoints", act.name);
        case "gateways": return href("gateways", act.name);
        case "pool": return href("pools", act.name);
        case "in_flight": return href("inflight", "", { sort: "longest" });
        case "history": return href("history");
        case "audit":
        case "system": return href("system");
        default: return null;
      }
    },
    press(act) {
      if (act.target === "resume") openDialog("stop", { pool: act.name, action: "resume" });
      else if (act.target === "change_cap" && act.name) openDialog("edit", { list: "pools", id: act.name });
      else openDialog("edit", { list: "group", id: "" });
    },
    // Names of pools, endpoints and gateways stand out in a sentence; all of it is set as text.
    cells(sentence) {
      const names = [...Object.keys(S.endpoints), ...Object.keys(S.gateways)];
      const found = [];
      for (const word of sentence.split(/(\s+)/)) {
        const bare = word.replace(/[.,:;]+$/, "");
        const known = bare && (bare in S.pools || names.includes(bare));
        if (known) found.push([bare, true], [word.slice(bare.length), false]);
        else if (found.length && !found[found.length - 1][1]) found[found.length - 1][0] += word;
        else found.push([word, false]);
      }
      return found;
    },
  },
  template: `
<section class="panel attention" aria-label="Needs attention">
  <div v-for="row in shown" :key="row.id" class="row" :class="{ cleared: row.cleared }" :data-rule="row.rule">
    <badge :name="look(row.kind)[0]" :tone="look(row.kind)[1]" :label="row.kind"></badge>
    <span class="sentence"><template v-for="[text, strong] in cells(row.sentence)"><b v-if="strong"><bdi>{{ text }}</bdi></b><template v-else>{{ text }}</template></template><span v-if="row.cleared" class="dim"> · cleared</span></span>
    <span class="since dim"><template v-if="row.since_ms">for <age :at="row.since_ms"></age></template></span>
    <a v-if="row.act && target(row.act)" class="go" :href="target(row.act)">{{ row.act.label }} <span aria-hidden="true">→</span></a>
    <act v-else-if="row.act" class="go" kind="quiet link" @act="press(row.act)">{{ row.act.label }} <span aria-hidden="true">→</span></act>
  </div>
  <button v-if="!all && rows.length > 5" class="quiet link more" @click="all = true">{{ rows.length - 5 }} more</button>
  <p v-if="!rows.length" class="calm">Nothing needs attention. {{ oldest }}<template v-if="!oldest">Oldest wait <age :at="S.one.totals?.oldest_ms"></age>.</template></p>
</section>`,
};

export const Totals = {
  components: parts,
  computed: {
    t: () => S.one.totals || {},
    g: () => S.one.group || {},
    lines: () => S.one.lines || {},
    UNKNOWN: () => UNKNOWN,
    failed() {
      const { not_ok, ended } = this.t;
      if (not_ok === null || not_ok === undefined) return null;
      return ended ? not_ok / ended : 0;
    },
    whole() {
      const known = [this.t.wait_ms, this.t.run_ms].filter((ms) => ms !== null && ms !== undefined);
      return known.length === 2 ? known[0] + known[1] + (this.t.deliver_ms || 0) : null;
    },
    young() {
      return this.t.since_ms && S.now - this.t.since_ms < 890_000 ? clock(this.t.since_ms) : "";
    },
  },
  methods: {
    count, percent, rate, duration, plural,
    split(text) {
      const cut = text.search(/[/%]/);
      return cut < 0 ? [text, ""] : [text.slice(0, cut).trim(), text.slice(cut)];
    },
    part(ms) {
      return { flexGrow: Math.max(ms, this.whole * 0.004) };
    },
  },
  template: `
<section class="panel totals" aria-label="Totals">
  <div class="total"><h2>Waiting</h2><p class="figure"><b><num :n="t.waiting"></num></b></p>
    <p class="sub"><template v-if="t.waiting">oldest <age :at="t.oldest_ms"></age> · <b>{{ count(t.waiting_pools) }}</b> {{ plural(t.waiting_pools, 'pool') }}</template><template v-else-if="t.waiting === 0">none<template v-if="t.delayed"> · +{{ t.delayed }} delayed</template></template><template v-else>{{ UNKNOWN }}</template></p><spark :points="lines.waiting" label="waiting" :width="84"></spark></div>
  <div class="total"><h2>In flight</h2><p class="figure"><b><num :n="t.in_flight"></num></b><span>of {{ count(g.cap) }} slots</span></p>
    <p class="sub"><template v-if="t.longest_ms">longest <age :at="t.longest_ms"></age> · </template><template v-if="t.gateways === 0">no gateway</template><template v-else><b>{{ count(t.gateways) }}</b> {{ plural(t.gateways, 'gateway') }}</template></p><spark :points="lines.in_flight" label="in flight" :width="84"></spark></div>
  <div class="total"><h2>Finished</h2><p class="figure"><template v-if="t.finished === null"><b class="unk small">measuring</b></template><template v-else><b>{{ split(rate(t.finished))[0] }}</b><span>{{ split(rate(t.finished))[1] }}</span></template></p>
    <p class="sub">arriving <b>{{ t.arriving === null ? 'measuring' : rate(t.arriving) }}</b></p><spark :points="lines.finished" label="finished per second" :width="84"></spark></div>
  <div class="total"><h2>Not succeeded, 15 min</h2><p class="figure"><template v-if="failed === null"><b class="unk small">measuring</b></template><template v-else><b>{{ split(percent(failed))[0] }}</b><span>{{ split(percent(failed))[1] }}</span></template></p>
    <p class="sub" v-if="t.ended !== null"><b>{{ count(t.not_ok) }}</b> of <b>{{ count(t.ended) }}</b><template v-if="t.not_ok && t.error"> · {{ t.error }}</template><template v-if="young"> · since {{ young }}</template></p><p class="sub" v-else>&nbsp;</p></div>
  <div class="total time"><h2>Where the time goes, mean of 15 min<span class="push"></span><span class="dim" v-if="whole !== null">total <dur :ms="whole"></dur></span></h2>
    <template v-if="whole !== null"><p class="stack" role="img" :aria-label="'wait ' + duration(t.wait_ms) + ', run ' + duration(t.run_ms)"><i class="t-hold" :style="part(t.wait_ms)"></i><i class="t-work" :style="part(t.run_ms)"></i><i v-if="t.deliver_ms" class="t-grey" :style="part(t.deliver_ms)"></i></p>
    <p class="legend"><span class="t-hold">wait <b><dur :ms="t.wait_ms"></dur></b></span><span class="t-work">run <b><dur :ms="t.run_ms"></dur></b></span><span class="t-grey">deliver <b><dur :ms="t.deliver_ms"></dur></b></span></p></template>
    <p v-else class="sub">{{ UNKNOWN }}: nothing that succeeded in the last 15 minutes was seen</p></div>
</section>`,
};

export const EndpointCard = {
  components: parts,
  props: { id: String },
  computed: {
    e() {
      return S.endpoints[this.id] || {};
    },
    look() {
      const e = this.e;
      if (e.breaker === "open") return ["octagon", "broken", e.probing ? "probing" : "breaker open"];
      if (e.breaker === "half_open") return ["octagon", "broken", "probing"];
      if (e.hold_until_ms) return ["hourglass", "hold", "asked to wait"];
      if (e.reason === "endpoint_gated") return ["hourglass", "hold", "holding"];
      if (e.reason === "endpoint_capacity") return ["bars", "hold", "full"];
      if (!e.breaker) return ["dashed", "grey", "state unknown"];
      return ["chevrons", "work", "open"];
    },
    link() {
      return href("endpoints", this.id);
    },
    top() {
      return (value, limit) => Math.max((limit || 1) * 2, value || 0);
    },
  },
  methods: { count },
  template: `
<div class="endpoint" :data-id="id">
  <p class="line"><badge :name="look[0]" :tone="look[1]" :label="look[2]"></badge><a :href="link" class="strong"><name :text="id"></name></a><code class="dim"><name :text="e.address" :most="30"></name></code><span class="push"></span><span class="sub"><span :class="'t-' + look[1]" class="word">{{ look[2] }}</span><template v-if="e.gated"> · <template v-if="e.breaker !== 'closed'">no sample while open</template><template v-else-if="e.sampled_ms">sample <age :at="e.sampled_ms"></age> old<template v-if="e.stale"> (too old)</template></template><template v-else>no sample yet</template></template><template v-else> · no gate</template></span></p>
  <div class="gauges">
    <span><span class="pair"><span class="sub">in flight</span><span><b>{{ count(e.in_flight) }}</b><span class="dim"> / {{ e.cap ? count(e.cap) : 'no cap' }}</span></span></span><gauge :value="e.in_flight" :top="e.cap || Math.max(8, e.in_flight || 0)" label="in flight"></gauge></span>
    <template v-if="e.gated"><span><span class="pair"><span class="sub">queue</span><span v-if="e.queue !== null"><b>{{ count(e.queue) }}</b><span class="dim"> / {{ count(e.target) }}</span></span><span v-else class="unk">unknown</span></span><gauge :value="e.queue" :top="top(e.queue, e.target)" :tick="e.target" :tone="e.queue >= e.target ? 'hold' : 'work'" label="engine queue"></gauge></span>
    <span><span class="pair"><span class="sub">ms/token</span><span v-if="e.token_ms !== null"><b>{{ count(Math.round(e.token_ms)) }}</b><span class="dim"> / {{ count(e.token_limit_ms) }}</span></span><span v-else class="unk">unknown</span></span><gauge :value="e.token_ms" :top="top(e.token_ms, e.token_limit_ms)" :tick="e.token_limit_ms" :tone="e.token_ms >= e.token_limit_ms ? 'hold' : 'work'" label="ms per token"></gauge></span></template>
    <template v-else><span><span class="pair"><span class="sub">attempts</span><b>{{ count(e.attempts) }}</b></span></span><span><span class="pair"><span class="sub">failed</span><span><b>{{ count(e.failures) }}</b><span v-if="e.error" class="dim"> · {{ e.error }}</span></span></span></span></template>
  </div>
</div>`,
};

// What holds the group back, by the rules of the verdict.
export function bottleneck() {
  const kinds = Object.values(S.attention).filter((row) => !row.cleared).sort((a, b) => a.rank - b.rank);
  for (const row of kinds) {
    if (row.rule === "endpoint_held" || row.rule === "breaker_open" || row.rule === "endpoint_fails") return `Bottleneck: ${row.act?.name || row.subject.split(":")[1]}`;
    if (row.rule === "pool_capped") return `Bottleneck: the cap of ${row.subject.split(":")[1]}`;
    if (row.rule === "group_capped") return "Bottleneck: the cap of the group";
    if (row.rule === "gateways_full" || row.rule === "no_gateway") return "Bottleneck: gateways";
  }
  return "Bottleneck: none";
}

export const GatewayRow = {
  components: parts,
  props: { id: String },
  computed: {
    g() {
      return S.gateways[this.id] || {};
    },
    leases() {
      return Object.values(S.leases).filter((lease) => lease.gateway === this.id);
    },
    ends() {
      const until = this.leases.map((lease) => lease.until_ms).filter(Boolean);
      return until.length ? Math.min(...until) : null;
    },
    link() {
      return href("gateways", this.id);
    },
  },
  methods: { count, plural },
  template: `
<div class="gateway" role="row" :data-id="id"><span class="g-name" role="cell"><icon v-if="g.state === 'draining'" name="drain" label="draining" class="t-person"></icon><icon v-else-if="g.state === 'live'" name="idle" label="live" class="t-work dot"></icon><icon v-else name="octagon" :label="g.state" class="t-broken"></icon><a :href="link"><name :text="id" :most="26"></name></a><span v-if="g.state !== 'live'" :class="g.state === 'draining' ? 't-person' : 't-broken'" class="word">{{ g.state === 'late' ? 'no heartbeat' : g.state }}</span></span>
  <template v-if="g.state === 'gone'"><span class="sub g-wide" role="cell"><template v-if="leases.length">{{ leases.length }} {{ plural(leases.length, 'lease expires', 'leases expire') }} in <age :at="ends" until></age></template><template v-else>nothing held</template></span></template>
  <template v-else><span class="g-bar" role="cell"><gauge :value="g.in_flight" :top="g.slots" label="slots in use"></gauge></span><span class="g-slots" role="cell"><b>{{ count(g.in_flight) }}</b><span class="dim"> / {{ count(g.slots) }}</span></span></template><span class="g-beat dim" role="cell"><age :at="g.beat_ms"></age></span></div>`,
};

export const EventRow = {
  components: parts,
  props: { event: Object, full: Boolean },
  computed: {
    told() {
      return told(this.event);
    },
    when() {
      return clock(this.event.at_ms);
    },
    first() {
      return clock(this.event.first_ms);
    },
  },
  template: `<div class="event"><time class="num" :title="event.at_ms ? new Date(event.at_ms).toISOString() : ''">{{ when }}</time><badge :name="told.icon" :tone="told.tone" :label="event.kind"></badge><span class="two"><span class="what"><template v-for="[text, strong] in told.parts"><b v-if="strong"><bdi>{{ text }}</bdi></b><template v-else>{{ text }}</template></template></span><span class="sub" v-if="told.more || event.times > 1">{{ told.more }}<template v-if="event.times > 1"> · {{ event.times }} moves since {{ first }}</template></span></span><slot></slot></div>`,
};

export function newestEvents(most) {
  const order = (id) => id.split("-").map(Number);
  return Object.entries(S.events)
    .map(([id, row]) => ({ id, ...row }))
    .sort((a, b) => order(b.id)[0] - order(a.id)[0] || order(b.id)[1] - order(a.id)[1])
    .slice(0, most);
}

export const Overview = {
  components: { ...parts, Attention, Totals, PoolMap, EndpointCard, GatewayRow, EventRow },
  computed: {
    S: () => S,
    endpoints() {
      const rank = (e) => (e.breaker === "open" ? 0 : e.reason ? 1 : 2);
      return Object.keys(S.endpoints).sort((a, b) => rank(S.endpoints[a]) - rank(S.endpoints[b]) || (a < b ? -1 : 1)).slice(0, 6);
    },
    gateways: () => Object.keys(S.gateways).sort().slice(0, 8),
    live() {
      const states = Object.values(S.gateways).map((g) => g.state);
      const n = (word) => states.filter((state) => state === word).length;
      return [[n("live"), "live"], [n("draining"), "draining"], [n("late"), "without heartbeat"], [n("gone"), "gone"]].filter(([k], at) => k || !at).map(([k, word]) => `${k} ${word}`).join(", ");
    },
    longest: () => Object.entries(S.leases).sort((a, b) => (a[1].claimed_ms || 0) - (b[1].claimed_ms || 0)).slice(0, 5),
    events: () => newestEvents(8),
    bottleneck: () => bottleneck(),
    unknown: () => S.one.status?.unknown || {},
  },
  methods: { href, shortId },
  template: `
<h1 class="hide" tabindex="-1">Overview of {{ S.group }}</h1>
<attention></attention>
<totals></totals>
<pool-map v-if="Object.keys(S.pools).length"></pool-map>
<section v-else class="panel empty-page"><h2>Pools</h2><p v-if="unknown.pools">Pools could not be read: {{ unknown.pools }}</p><p v-else>{{ S.group }} has no pools yet. Create them with <code>dispatch config apply</code>.</p></section>
<div class="three">
  <panel title="Endpoints" :note="bottleneck"><template #side><a :href="href('endpoints')">All</a></template><endpoint-card v-for="id in endpoints" :key="id" :id="id"></endpoint-card><p v-if="!endpoints.length" class="empty">{{ unknown.endpoints ? 'unknown: ' + unknown.endpoints : 'No endpoint is configured.' }}</p></panel>
  <panel title="Gateways" :note="live"><template #side><a :href="href('gateways')">All</a></template>
    <div role="table" aria-label="Gateways"><div class="thead gateway" role="row"><span role="columnheader" class="g-name">Gateway</span><span role="columnheader" class="g-cols">slots · heartbeat age</span></div><gateway-row v-for="id in gateways" :key="id" :id="id"></gateway-row></div>
    <p v-if="!gateways.length" class="empty">No gateway is live. Requests keep waiting in Valkey until their deadline. Start one: <code>dispatch gateway --group {{ S.group }}</code></p>
    <div role="table" aria-label="Longest in flight"><div class="thead" role="row"><span role="columnheader">Longest in flight</span><span role="columnheader">running for</span></div>
    <div v-for="[id, lease] in longest" :key="id" class="longest" role="row"><a role="cell" :href="href('requests', id)"><code>{{ shortId(id) }}</code></a><span role="cell" class="sub"><b class="mid"><name :text="lease.pool" :most="20"></name></b> on <name :text="lease.gateway" :most="20"></name></span><b role="cell" class="end"><age :at="lease.claimed_ms"></age></b></div></div>
    <p v-if="!longest.length" class="empty">Nothing runs.</p>
  </panel>
  <panel title="Changes and events" note="UTC"><template #side><a :href="href('changes')">All</a></template><event-row v-for="event in events" :key="event.id" :event="event"></event-row><p v-if="!events.length" class="empty">Nothing has changed yet.</p></panel>
</div>`,
};
