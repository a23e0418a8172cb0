// All pools, and one of them: its lane, what waits, why, and what the scheduler knows.
import { S, ask } from "./store.js";
import { R, href } from "./router.js";
import { parts } from "./parts.js";
import { Lane, PoolMap } from "./pool_map.js";
import { A, openDialog, openMenu } from "./acts.js";
import { Asked } from "./asked.js";
import { ending } from "./words.js";
import { bytes, clock, count, percent, plural, rate } from "./format.js";

export const Pools = {
  components: { ...parts, PoolMap },
  computed: { S: () => S, none: () => !Object.keys(S.pools).length },
  methods: {
    href,
    add: () => openDialog("edit", { list: "pools", id: "" }),
    group: () => openDialog("edit", { list: "group", id: "" }),
  },
  template: `
<header class="page-head"><h1 tabindex="-1">Pools</h1><span class="push"></span><act kind="wide" @act="group">Edit the group…</act><act kind="wide" @act="add">New pool…</act><a :href="href('config')">Config</a></header>
<pool-map v-if="!none"></pool-map><p v-else class="panel empty-page">{{ S.group }} has no pools yet. Create them with <code>dispatch config apply</code>, or here.</p>`,
};

const SKIPS = {
  insufficient_credit: "Its turn was not yet",
  protected: "Room was left for protected pools",
  lane_capacity: "Pool was at its cap",
  global_capacity: "Group was at its cap",
  endpoint_capacity: "Endpoint was full",
  endpoint_gated: "Gate held",
  endpoint_open: "Breaker was open",
  paused: "Paused",
  malformed_head: "Unreadable request at the head",
};

export const Pool = {
  components: { ...parts, Lane, Asked },
  props: { id: String },
  data: () => ({ waiting: null, ended: null, problem: "" }),
  computed: {
    S: () => S,
    p() {
      return S.pools[this.id];
    },
    running() {
      return Object.entries(S.leases).filter(([, lease]) => lease.pool === this.id).sort((a, b) => (a[1].claimed_ms || 0) - (b[1].claimed_ms || 0));
    },
    skips() {
      const found = Object.entries(this.p.skips || {}).sort((a, b) => b[1] - a[1]);
      const top = found.length ? found[0][1] : 1;
      return found.map(([code, n]) => ({ code, n, share: (n / top) * 100 + "%", text: SKIPS[code] || code }));
    },
    rows() {
      return [...(this.waiting?.queued || []), ...(this.waiting?.delayed || [])];
    },
    ends() {
      return Object.entries(this.p.endings || {}).sort((a, b) => b[1] - a[1]);
    },
    refused() {
      return Object.entries(this.p.rejected || {}).sort((a, b) => b[1] - a[1]);
    },
    paused() {
      return Boolean(this.p.stopped);
    },
  },
  watch: {
    "p.waiting"() {
      if (Date.now() - (this.fetched || 0) > 3000) this.fetch();
    },
  },
  created() {
    this.fetch();
    this.timer = setInterval(() => document.hidden || S.frozen || A.dialog || A.menu || this.fetch(), 5000);
  },
  unmounted() {
    clearInterval(this.timer);
  },
  methods: {
    href, ending, bytes, clock, count, percent, plural, rate, openDialog, openMenu,
    async fetch() {
      this.fetched = Date.now();
      try {
        this.waiting = await ask("waiting", { pool: this.id });
        this.ended = (await ask("endings", { pool: this.id })).rows.slice(0, 12);
        this.problem = "";
      } catch (error) {
        this.problem = error.message;
      }
    },
    stop(action) {
      openDialog("stop", { pool: this.id, action });
    },
    cancel(row, running) {
      openDialog("cancel", { id: row.request_id, pool: this.id, submitted_ms: row.submitted_ms, producer: row.producer_id, running, done: () => this.fetch() });
    },
  },
  template: `
<section v-if="!p" class="panel empty-page"><h1 tabindex="-1">No pool {{ id }}</h1><p>It is not in the config of {{ S.group }}. <a :href="href('pools')">All pools</a></p></section>
<template v-else>
<header class="page-head"><h1 tabindex="-1"><name :text="id" :most="48"></name></h1><span class="why word" :class="'t-' + p.tone">{{ p.why }}</span><span class="push"></span>
  <act v-if="!paused" @act="stop('pause')">Pause…</act><act v-if="!paused" kind="wide" @act="stop('drain')">Drain…</act><act v-else @act="stop('resume')">Resume…</act><act @act="openDialog('edit', { list: 'pools', id })">Edit…</act><act kind="wide" @act="openDialog('cancelMany', { pool: id })">Cancel what waits…</act></header>
<section class="panel map" aria-label="Now"><div role="table" aria-label="Now"><lane :id="id"></lane></div></section>
<div class="two-one">
  <div>
    <panel title="Waiting" id="waiting" :note="p.waiting === null ? 'unknown' : count(p.waiting) + (waiting && waiting.more ? ', the first 200 shown' : '')">
      <asked :problem="problem" :known="waiting" :rows="rows" empty="Nothing waits.">
      <table><caption class="hide">Waiting requests</caption><thead><tr><th class="r">#</th><th>Request</th><th>Producer</th><th>Model</th><th class="r">Cost</th><th class="r">Waits for</th><th class="r">Deadline in</th><th class="r">Attempt</th><th><span class="hide">Acts</span></th></tr></thead>
      <tbody><tr v-for="(row, n) in rows" :key="row.request_id" data-row tabindex="-1"><td class="r dim">{{ n + 1 }}</td><td><a :href="href('requests', row.request_id)"><code><name :text="row.request_id" :most="14"></name></code></a><span v-if="row.state === 'delayed'" class="sub"> next attempt in <age :at="row.due_ms" until></age></span></td><td><name :text="row.producer_id" :most="24"></name></td><td><name :text="row.model" :most="20"></name></td><td class="r">{{ count(row.cost) }}</td><td class="r"><age :at="row.submitted_ms"></age></td><td class="r"><age :at="row.deadline_ms" until></age></td><td class="r">{{ count(row.attempt) }}</td><td class="r"><act kind="quiet link" @act="cancel(row, false)">Cancel…</act></td></tr></tbody></table>
      </asked>
    </panel>
    <panel title="In flight" :note="count(p.in_flight)">
      <table v-if="running.length"><caption class="hide">Running requests</caption><thead><tr><th>Request</th><th>Gateway</th><th>Model</th><th class="r">Running for</th><th class="r">Lease left</th><th>State</th></tr></thead>
      <tbody><tr v-for="[key, lease] in running" :key="key" data-row tabindex="-1"><td><a :href="href('requests', key)"><code><name :text="key" :most="14"></name></code></a></td><td><name :text="lease.gateway" :most="24"></name></td><td><name :text="lease.model" :most="20"></name></td><td class="r"><age :at="lease.claimed_ms"></age></td><td class="r"><age :at="lease.until_ms" until></age></td><td>{{ lease.state }}</td></tr></tbody></table>
      <p v-else class="empty">Nothing runs.</p>
    </panel>
    <panel title="Ended lately">
      <asked :known="ended" :rows="ended || []" :problem="problem" empty="Nothing ended lately."><table><caption class="hide">Requests that ended lately</caption><thead><tr><th>Ended</th><th>Request</th><th>Ending</th><th class="r">Wait</th><th class="r">Run</th></tr></thead>
      <tbody><tr v-for="row in ended" :key="row.record_id"><td class="num">{{ clock(row.ended_ms) }}</td><td><a :href="href('requests', row.request_id)"><code><name :text="row.request_id" :most="14"></name></code></a></td><td><icon :name="ending(row.ending).icon" :class="'t-' + ending(row.ending).tone"></icon> {{ row.error_type || row.ending }}</td><td class="r"><dur v-if="row.claimed_ms" :ms="row.claimed_ms - row.submitted_ms"></dur><template v-else>–</template></td><td class="r"><dur v-if="row.claimed_ms" :ms="row.ended_ms - row.claimed_ms"></dur><span v-else class="dim">never ran</span></td></tr></tbody></table></asked>
    </panel>
  </div>
  <div>
    <panel title="Scheduler state"><dl class="facts"><dt>Credit</dt><dd>{{ count(p.deficit) }}</dd><dt>Head costs</dt><dd>{{ p.waiting ? count(p.head_cost) : '–' }}</dd><dt>Weight (credit per visit)</dt><dd>{{ count(p.weight) }}</dd><dt>Place</dt><dd>{{ p.place || 'unknown' }}</dd><dt>Why</dt><dd>{{ p.why }}<template v-if="p.more">, {{ p.more }}</template></dd><dt v-if="p.since_ms">Since</dt><dd v-if="p.since_ms"><age :at="p.since_ms"></age></dd><dt>Submitted</dt><dd>{{ count(p.submitted_n) }}</dd><dt>Launched</dt><dd>{{ count(p.launched_n) }}</dd><dt>Cost served</dt><dd>{{ count(p.served) }} units</dd></dl></panel>
    <panel title="Passed over, 5 min" note="how often, by reason"><div v-for="skip in skips" :key="skip.code" class="passed"><span>{{ skip.text }}</span><b>{{ count(skip.n) }}</b><span class="meter t-hold"><i :style="{ width: skip.share }"></i></span></div><p v-if="!skips.length" class="empty">It was never passed over.</p></panel>
    <panel title="Config"><template #side><a :href="href('config')">All</a></template><dl class="facts"><dt>Protected slots</dt><dd>{{ count(p.min) }}</dd><dt>Cap</dt><dd>{{ p.cap === null ? 'the group’s' : count(p.cap) }}</dd><dt>Waiting at most</dt><dd>{{ count(p.depth) }}</dd><dt>Waiting bytes</dt><dd>{{ bytes(p.bytes) }}</dd><dt>Endpoint</dt><dd><a :href="href('endpoints', p.endpoint)"><name :text="p.endpoint"></name></a></dd><dt>Delivery</dt><dd>{{ (p.delivery || 'unknown').replaceAll('_', ' ') }}</dd><dt>Generation</dt><dd>{{ count(S.one.group?.generation) }}</dd></dl></panel>
    <panel title="Endings" note="since the pool was made"><dl class="facts"><template v-for="[word, n] in ends" :key="word"><dt><icon :name="ending(word).icon" :class="'t-' + ending(word).tone"></icon> {{ word.replaceAll('_', ' ') }}</dt><dd>{{ count(n) }}</dd></template><template v-for="[word, n] in refused" :key="'r' + word"><dt><icon name="barred" class="t-hold"></icon> refused: {{ word.replaceAll('_', ' ') }}</dt><dd>{{ count(n) }}</dd></template></dl><p v-if="!ends.length && !refused.length" class="empty">Nothing has ended in it yet.</p></panel>
  </div>
</div></template>`,
};
