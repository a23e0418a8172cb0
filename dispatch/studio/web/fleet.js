// Endpoints and gateways, all and one.
import { S } from "./store.js";
import { href } from "./router.js";
import { parts } from "./parts.js";
import { openDialog } from "./acts.js";
import { EndpointCard, EventRow, newestEvents, bottleneck } from "./overview.js";
import { count, iso, plural } from "./format.js";

export const Endpoints = {
  components: { ...parts, EndpointCard, EventRow },
  props: { id: String },
  computed: {
    S: () => S,
    ids() {
      return this.id ? [this.id].filter((id) => id in S.endpoints) : Object.keys(S.endpoints).sort();
    },
    e() {
      return S.endpoints[this.id] || {};
    },
    pools() {
      return Object.entries(S.pools).filter(([, pool]) => pool.endpoint === this.id).sort((a, b) => (b[1].waiting || 0) - (a[1].waiting || 0));
    },
    events() {
      return newestEvents(50).filter((event) => event.facts?.endpoint === this.id);
    },
    bottleneck: () => bottleneck(),
  },
  methods: { href, count, openDialog },
  template: `
<header class="page-head"><h1 tabindex="-1"><template v-if="id"><name :text="id" :most="48"></name></template><template v-else>Endpoints</template></h1><span class="note">{{ bottleneck }}</span><span class="push"></span><act v-if="id && ids.length" @act="openDialog('edit', { list: 'endpoints', id })">Edit…</act><act v-else-if="!id" kind="wide" @act="openDialog('edit', { list: 'endpoints', id: '' })">New endpoint…</act><a v-if="id" :href="href('endpoints')">All endpoints</a></header>
<section class="panel"><endpoint-card v-for="one in ids" :key="one" :id="one"></endpoint-card><p v-if="!ids.length" class="empty">{{ id ? 'No such endpoint in the config of ' + S.group + '.' : 'No endpoint is configured.' }}</p></section>
<div v-if="id && ids.length" class="two-one">
  <div><panel title="Pools that use it" :note="count(pools.length)"><table><caption class="hide">Pools that use it</caption><thead><tr><th>Pool</th><th class="r">Waiting</th><th class="r">In flight</th><th>Why</th></tr></thead><tbody><tr v-for="[name, pool] in pools" :key="name" data-row tabindex="-1"><td><a :href="href('pools', name)"><name :text="name"></name></a></td><td class="r"><num :n="pool.waiting"></num></td><td class="r"><num :n="pool.in_flight"></num></td><td :class="'t-' + pool.tone" class="word">{{ pool.why }}</td></tr></tbody></table></panel>
  <panel title="Breaker" note="UTC"><event-row v-for="event in events" :key="event.id" :event="event"></event-row><p v-if="!events.length" class="empty">Nothing happened to it lately.</p></panel></div>
  <panel title="State"><dl class="facts"><dt>Address</dt><dd><code>{{ e.address || 'unknown' }}</code></dd><dt>Breaker</dt><dd>{{ e.breaker || 'unknown' }}<template v-if="e.breaker_since_ms">, since <age :at="e.breaker_since_ms"></age></template></dd><dt>Failures in a row</dt><dd>{{ count(e.failures_in_a_row) }} <span class="dim">of {{ count(e.breaker_failures) }}</span></dd><dt v-if="e.open_until_ms">Next probe in</dt><dd v-if="e.open_until_ms"><age :at="e.open_until_ms" until></age></dd><dt v-if="e.breaker === 'half_open'">Good probes</dt><dd v-if="e.breaker === 'half_open'">{{ count(e.good_probes) }} of {{ count(e.close_after) }}</dd><dt>Asked to wait</dt><dd><template v-if="e.hold_until_ms">for <age :at="e.hold_until_ms" until></age></template><template v-else>no</template></dd><dt>Attempts</dt><dd>{{ count(e.attempts) }}</dd><dt>Failed</dt><dd>{{ count(e.failures) }}</dd><dt>Last error</dt><dd><template v-if="e.error">{{ e.error }}, <age :at="e.error_ms"></age> ago</template><template v-else>none</template></dd><template v-if="e.gated"><dt>Gate</dt><dd>{{ e.engine }}, target {{ count(e.target) }}, limit {{ count(e.token_limit_ms) }} ms per token</dd><dt>Fail mode</dt><dd>{{ e.fail }}</dd></template></dl></panel>
</div>`,
};

export const Gateways = {
  components: parts,
  props: { id: String },
  computed: {
    S: () => S,
    ids() {
      return this.id ? [this.id].filter((id) => id in S.gateways) : Object.keys(S.gateways).sort();
    },
    versions() {
      return new Set(Object.values(S.gateways).map((g) => g.version)).size;
    },
    leases() {
      return Object.entries(S.leases).filter(([, lease]) => lease.gateway === this.id).sort((a, b) => (a[1].claimed_ms || 0) - (b[1].claimed_ms || 0));
    },
  },
  methods: { href, count, iso, plural },
  template: `
<header class="page-head"><h1 tabindex="-1"><template v-if="id"><name :text="id" :most="48"></name></template><template v-else>Gateways</template></h1><span v-if="versions > 1" class="t-hold word">{{ versions }} versions run side by side</span><span class="push"></span><a v-if="id" :href="href('gateways')">All gateways</a></header>
<section class="panel scroll"><table class="cards"><caption class="hide">Gateways</caption><thead><tr><th>Gateway</th><th>State</th><th class="r">In use</th><th class="r">Slots</th><th class="r">Heartbeat</th><th>Version</th><th>Host</th><th class="r">Process</th><th class="r">Running for</th></tr></thead>
<tbody><tr v-for="one in ids" :key="one" data-row tabindex="-1"><td><a :href="href('gateways', one)"><name :text="one" :most="36"></name></a></td><td class="word" :class="{ live: 't-work', draining: 't-person', late: 't-broken', gone: 't-broken' }[S.gateways[one].state]">{{ S.gateways[one].state === 'late' ? 'no heartbeat' : S.gateways[one].state }}</td><td class="r"><num :n="S.gateways[one].in_flight"></num></td><td class="r"><num :n="S.gateways[one].slots"></num></td><td class="r"><age :at="S.gateways[one].beat_ms"></age></td><td>{{ S.gateways[one].version || 'unknown' }}</td><td><name :text="S.gateways[one].host" :most="24"></name></td><td class="r">{{ S.gateways[one].pid ?? 'unknown' }}</td><td class="r"><age :at="S.gateways[one].started_ms"></age></td></tr></tbody></table>
<p v-if="!ids.length" class="empty">{{ id ? 'No such gateway is registered; one that is gone leaves after ten minutes.' : 'No gateway is live. Requests keep waiting in Valkey until their deadline. Start one:' }} <code v-if="!id">dispatch gateway --group {{ S.group }}</code></p></section>
<panel v-if="id && ids.length" title="What it runs" :note="count(leases.length)"><table v-if="leases.length"><caption class="hide">What it runs</caption><thead><tr><th>Request</th><th>Pool</th><th class="r">Running for</th><th class="r">Lease left</th><th>State</th></tr></thead><tbody><tr v-for="[key, lease] in leases" :key="key" data-row tabindex="-1"><td><a :href="href('requests', key)"><code><name :text="key" :most="14"></name></code></a></td><td><name :text="lease.pool"></name></td><td class="r"><age :at="lease.claimed_ms"></age></td><td class="r"><age :at="lease.until_ms" until></age></td><td>{{ lease.state }}</td></tr></tbody></table><p v-else class="empty">It runs nothing.</p><p class="pad dim">To drain a gateway, send SIGTERM to process {{ S.gateways[id].pid ?? 'unknown' }} on {{ S.gateways[id].host || 'its host' }}: it takes nothing more and lets what runs finish.</p></panel>`,
};
