// The system behind the group, and how its signals are read.
import { S, ask, freshness, status } from "./store.js";
import { href } from "./router.js";
import { parts } from "./parts.js";
import { clock, count } from "./format.js";

export const System = {
  components: parts,
  data: () => ({ found: null, problem: "" }),
  computed: {
    S: () => S,
    state: () => freshness.value,
    status: () => status.value,
    audit() {
      return Object.entries(this.found?.audit || {}).filter(([name, value]) => name !== "part" && typeof value !== "object");
    },
    versions() {
      const by = {};
      for (const g of Object.values(S.gateways)) by[g.version || "unknown"] = (by[g.version || "unknown"] || 0) + 1;
      return Object.entries(by);
    },
    offset: () => Math.abs(S.now - Date.now()),
    parts() {
      return Object.entries(status.value.unknown || {});
    },
  },
  created() {
    this.fetch();
  },
  methods: {
    href, clock, count,
    async fetch() {
      try {
        this.found = await ask("system");
        this.problem = "";
      } catch (error) {
        this.problem = error.message;
      }
    },
  },
  template: `
<header class="page-head"><h1 tabindex="-1">System</h1><span class="push"></span><button @click="fetch">Look again</button></header>
<p v-if="problem" class="problem" role="alert">{{ problem }}</p>
<div class="three">
  <panel title="Valkey"><dl class="facts"><dt>State</dt><dd>{{ state === 'away' ? 'does not answer' : 'answers' }}</dd><template v-if="status.problem"><dt>Problem</dt><dd>{{ status.problem }}</dd></template><dt>Server clock</dt><dd>{{ clock(S.now) }} UTC</dd><dt>Against this browser</dt><dd><dur :ms="offset"></dur> apart</dd></dl></panel>
  <panel title="Function library"><dl class="facts" v-if="found"><dt>Contract</dt><dd>{{ found.contract }}</dd><dt>Version</dt><dd>{{ found.version }}</dd><dt>Digest</dt><dd><copy :text="found.digest.slice(0, 16)"></copy></dd></dl><dl class="facts"><dt>Gateways run</dt><dd><span v-for="[version, n] in versions" :key="version" class="block">{{ n }} with {{ version }}</span><template v-if="!versions.length">none is live</template></dd></dl></panel>
  <panel title="History"><p class="pad" v-if="found && !found.history">History is off. Set <code>history.url</code> to keep finished requests.</p><p class="pad" v-else-if="found">History is on. <a :href="href('history')">Open it</a></p></panel>
  <panel title="Group record" note="what an audit reads of it"><dl class="facts"><template v-for="[name, value] in audit" :key="name"><dt>{{ name.replaceAll('_', ' ') }}</dt><dd>{{ typeof value === 'number' ? count(value) : value }}</dd></template></dl><p class="pad dim">All structures are held against each other by <code>dispatch doctor --group {{ S.group }}</code>.</p></panel>
  <panel v-if="parts.length" title="Not read"><dl class="facts"><template v-for="[name, why] in parts" :key="name"><dt>{{ name }}</dt><dd>{{ why }}</dd></template></dl></panel>
</div>`,
};

export const Signals = {
  components: parts,
  data: () => ({ rows: null, problem: "" }),
  async created() {
    try {
      this.rows = await ask("signals");
    } catch (error) {
      this.problem = error.message;
    }
    this.$nextTick(() => location.hash && document.getElementById(location.hash.slice(1))?.scrollIntoView());
  },
  methods: { href },
  template: `
<header class="page-head"><h1 tabindex="-1">Reading the signals</h1><span class="note">where to look first, and what it may be now</span></header>
<p v-if="problem" class="problem" role="alert">{{ problem }}</p>
<section v-for="row in rows || []" :key="row.slug" class="panel signal" :id="row.slug"><header class="panel-head"><badge :name="row.seen === null ? 'dashed' : row.seen ? 'alert' : 'ok'" :tone="row.seen ? 'hold' : 'grey'" :label="row.seen === null ? 'unknown' : row.seen ? 'seen now' : 'not seen'"></badge><h2>{{ row.symptom }}</h2><span class="note">{{ row.seen === null ? 'unknown: what would show it could not be read' : row.seen ? 'seen now' : 'not seen now' }}</span></header>
<p class="pad">Look first at: <b>{{ row.look_first }}</b></p><p class="pad">{{ row.hint }}</p><ul v-if="row.causes.length" class="plain pad"><li v-for="cause in row.causes" :key="cause">{{ cause }}</li></ul></section>`,
};
