// Who changed what, and the config: its forms, its generations, and the way back.
import { S, ask } from "./store.js";
import { R, href, setQuery } from "./router.js";
import { parts } from "./parts.js";
import { openDialog } from "./acts.js";
import { Asked } from "./asked.js";
import { EventRow } from "./overview.js";
import { clock, count, day } from "./format.js";

const KINDS = { config: "Config", pause: "Pauses", breaker: "Breakers", key: "Keys", other: "Other" };
const kindOf = (kind) => (["pause", "resume", "drain"].includes(kind) ? "pause" : ["config", "breaker", "key"].includes(kind) ? kind : "other");

export const Changes = {
  components: { ...parts, EventRow, Asked },
  data: () => ({ older: null, cursor: "", problem: "", open: {} }),
  computed: {
    S: () => S,
    R: () => R,
    kinds: () => KINDS,
    newest: () => Object.keys(S.events).length,
    rows() {
      const text = (R.query.f || "").toLowerCase();
      const kind = R.query.kind || "";
      const all = new Map();
      for (const [id, row] of Object.entries(S.events)) all.set(id, { id, ...row });
      for (const row of this.older || []) all.set(row.id, row);
      const order = (id) => id.split("-").map(Number);
      return [...all.values()]
        .filter((row) => !kind || kindOf(row.kind) === kind)
        .filter((row) => !text || Object.values(row.facts || {}).some((value) => value.toLowerCase().includes(text)))
        .sort((a, b) => order(b.id)[0] - order(a.id)[0] || order(b.id)[1] - order(a.id)[1]);
    },
  },
  created() {
    this.more();
  },
  methods: {
    href, day, count,
    filter: (event) => setQuery({ f: event.target.value }),
    only: (kind) => setQuery({ kind: R.query.kind === kind ? "" : kind }),
    async more() {
      try {
        const page = await ask("events", { cursor: this.cursor });
        this.older = [...(this.older || []), ...page.rows];
        this.cursor = page.cursor;
      } catch (error) {
        this.problem = error.message;
      }
    },
    async diff(event) {
      const number = Number(event.facts.generation);
      if (this.open[number]) return delete this.open[number];
      try {
        this.open[number] = await ask("generation", { generation: number });
      } catch (error) {
        this.open[number] = { changes: [], problem: error.message };
      }
      return true;
    },
    undo: (number) => openDialog("edit", { list: "rollback", generation: number - 1 }),
  },
  template: `
<header class="page-head"><h1 tabindex="-1">Changes</h1><span class="note">UTC, newest first</span><span class="push"></span><label class="find"><icon name="search" :size="14"></icon><span class="hide">Filter by actor or object</span><input type="search" placeholder="Actor or object" :value="R.query.f || ''" @input="filter" autocomplete="off"><kbd>f</kbd></label><span class="choice" role="group" aria-label="Kind"><button v-for="(word, kind) in kinds" :key="kind" :aria-pressed="R.query.kind === kind" @click="only(kind)">{{ word }}</button></span></header>
<section class="panel"><template v-for="event in rows" :key="event.id"><event-row :event="event" data-row tabindex="-1"><span class="push"></span><template v-if="event.kind === 'config'"><button class="quiet link" @click="diff(event)">{{ open[event.facts.generation] ? 'Hide' : 'What changed' }}</button><act v-if="Number(event.facts.generation) > 1" kind="quiet link" @act="undo(Number(event.facts.generation))">Undo…</act></template></event-row>
<div v-if="event.kind === 'config' && open[event.facts.generation]" class="diff"><p v-if="open[event.facts.generation].problem" class="dim">{{ open[event.facts.generation].problem }}</p><div v-for="[field, before, after] in open[event.facts.generation].changes" :key="field" class="change"><code>{{ field }}</code><span><del>{{ before }}</del> → <ins>{{ after }}</ins></span></div><p v-if="!open[event.facts.generation].changes.length" class="dim">The first config: nothing came before it.</p></div></template>
<p v-if="problem" class="problem">{{ problem }}</p><p v-if="!rows.length && older" class="empty">Nothing has changed{{ R.query.f || R.query.kind ? ' that matches' : ' yet' }}.</p><p v-if="cursor" class="pad"><button class="quiet link" @click="more">Older</button></p><p v-else-if="rows.length && older" class="empty">What is older was trimmed.</p></section>`,
};

export const Config = {
  components: { ...parts, Asked },
  data: () => ({ found: null, gens: null, cursor: "", problem: "" }),
  computed: {
    S: () => S,
    R: () => R,
    doc() {
      return this.found?.document || {};
    },
    pools() {
      const text = (R.query.f || "").toLowerCase();
      return (this.doc.pools || []).filter((pool) => !text || pool.pool_id.toLowerCase().includes(text)).slice(0, 300);
    },
    now: () => S.one.group?.generation,
  },
  watch: {
    now() {
      this.cursor = "";
      this.gens = null;
      this.fetch();
    },
  },
  created() {
    this.fetch();
  },
  methods: {
    href, count, clock, day, openDialog,
    filter: (event) => setQuery({ f: event.target.value }),
    async fetch() {
      try {
        this.found = await ask("config");
        await this.more();
        this.problem = "";
      } catch (error) {
        this.problem = error.message;
      }
    },
    async more() {
      const page = await ask("generations", { cursor: this.cursor });
      this.gens = [...(this.gens || []), ...page.rows];
      this.cursor = page.cursor;
    },
  },
  template: `
<header class="page-head"><h1 tabindex="-1">Config</h1><span class="note" v-if="found">generation {{ found.generation }}, by <bdi>{{ found.actor || 'somebody' }}</bdi>, <age :at="found.changed_ms"></age> ago<template v-if="found.reason"> “{{ found.reason }}”</template></span><span class="push"></span><act @act="openDialog('edit', { list: 'group', id: '' })">Edit the group…</act><act kind="wide" @act="openDialog('edit', { list: 'pools', id: '' })">New pool…</act><act kind="wide" @act="openDialog('edit', { list: 'endpoints', id: '' })">New endpoint…</act></header>
<p v-if="problem" class="problem" role="alert">{{ problem }}</p>
<div class="two-one" v-if="found">
<div>
  <panel title="Pools" :note="count((doc.pools || []).length)"><template #side><label class="find"><icon name="search" :size="14"></icon><span class="hide">Filter pools</span><input type="search" placeholder="Filter pools" :value="R.query.f || ''" @input="filter"><kbd>f</kbd></label></template>
  <div class="scroll"><table class="cards"><caption class="hide">Pools as configured</caption><thead><tr><th>Pool</th><th class="r">Weight</th><th class="r">Protected</th><th class="r">Cap</th><th class="r">Burst</th><th class="r">Waiting at most</th><th>Endpoint</th><th>Delivery</th><th><span class="hide">Acts</span></th></tr></thead><tbody><tr v-for="pool in pools" :key="pool.pool_id" data-row tabindex="-1"><td><a :href="href('pools', pool.pool_id)"><name :text="pool.pool_id"></name></a></td><td class="r">{{ pool.quantum }}</td><td class="r">{{ pool.min_concurrent }}</td><td class="r">{{ pool.max_concurrent ?? '–' }}</td><td class="r">{{ pool.max_burst_per_visit ?? '–' }}</td><td class="r">{{ count(pool.max_queue_depth) }}</td><td><name :text="pool.endpoint"></name></td><td>{{ (pool.delivery || '').replaceAll('_', ' ') }}</td><td class="r"><act kind="quiet link" @act="openDialog('edit', { list: 'pools', id: pool.pool_id })">Edit…</act></td></tr></tbody></table></div></panel>
  <panel title="Endpoints" :note="count((doc.endpoints || []).length)"><div class="scroll"><table class="cards"><caption class="hide">Endpoints as configured</caption><thead><tr><th>Endpoint</th><th>Address</th><th>Key variable</th><th class="r">Cap</th><th class="r">Breaker after</th><th>Gate</th><th><span class="hide">Acts</span></th></tr></thead><tbody><tr v-for="one in doc.endpoints" :key="one.endpoint_id" data-row tabindex="-1"><td><a :href="href('endpoints', one.endpoint_id)"><name :text="one.endpoint_id"></name></a></td><td><code><name :text="one.url" :most="40"></name></code></td><td><code>{{ one.api_key_env || '–' }}</code></td><td class="r">{{ one.max_concurrent ?? '–' }}</td><td class="r">{{ one.breaker_failures }}</td><td>{{ one.gate }}</td><td class="r"><act kind="quiet link" @act="openDialog('edit', { list: 'endpoints', id: one.endpoint_id })">Edit…</act></td></tr></tbody></table></div></panel>
</div>
<div>
  <panel title="Group"><dl class="facts"><template v-for="name in ['policy', 'total_concurrent_dispatch', 'max_queued', 'max_payload_bytes', 'cost_min', 'cost_max', 'lease_ms', 'liveness_ms', 'retention_ms', 'retry_budget_percent', 'dead_kept']" :key="name"><dt>{{ name.replaceAll('_', ' ') }}</dt><dd>{{ typeof doc[name] === 'number' ? count(doc[name]) : doc[name] ?? 'unknown' }}</dd></template></dl></panel>
  <panel title="Generations" note="newest first"><div v-for="one in gens" :key="one.generation" class="event generation" data-row tabindex="-1"><b class="num">{{ one.generation }}</b><span class="two"><span class="what"><b><bdi>{{ one.actor || 'somebody' }}</bdi></b> changed {{ count(one.changed) }} {{ one.changed === 1 ? 'field' : 'fields' }}</span><span class="sub"><template v-if="one.reason">“{{ one.reason }}” · </template>{{ day(one.changed_ms) }} {{ clock(one.changed_ms) }}</span></span><span class="push"></span><act v-if="one.generation !== found.generation" kind="quiet link" @act="openDialog('edit', { list: 'rollback', generation: one.generation })">Go back…</act><span v-else class="sub">in force</span></div><p v-if="cursor" class="pad"><button class="quiet link" @click="more">Older</button></p></panel>
</div></div><p v-else-if="!problem" class="empty">Reading…</p>`,
};
