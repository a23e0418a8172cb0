// The bar on top: where I am, how fresh the figures are, finding things, theme, who I am.
import { S, freshness, freeze, status, isStale } from "./store.js";
import { R, go, href } from "./router.js";
import { parts } from "./parts.js";
import { A, openDialog } from "./acts.js";
import { clock, count, duration, initials } from "./format.js";

const PAGES = [["overview", "Overview", "overview"], ["pools", "Pools", "pools"], ["inflight", "In flight", "chevrons"], ["history", "History", "clock"], ["endpoints", "Endpoints", "gone"], ["gateways", "Gateways", "idle"], ["changes", "Changes", "person"]];
const MORE = [["config", "Config", "pools"], ["system", "System", "alert"], ["signals", "Reading the signals", "search"]];

export const Pill = {
  components: parts,
  computed: {
    word() {
      const ago = duration(Math.round(S.silence / 100) * 100 || 100);
      switch (freshness.value) {
        case "loading": return ["grey", "Reading…", ""];
        case "delayed": return ["hold", "Delayed", duration(S.silence)];
        case "stale": return ["hold", "Stale since", clock(S.heard)];
        case "lost": return ["broken", "No answer since", clock(S.heard)];
        case "away": return ["broken", "Stale since", clock(status.value.seen_ms ?? status.value.since_ms)];
        case "fresh": return ["work", "Live", `${ago} ago`];
        case "mismatch": return ["hold", "Another library", ""];
        default: return ["grey", "No config yet", ""];
      }
    },
    S: () => S,
  },
  methods: { freeze, clock },
  template: `<span class="pill" :class="'t-' + word[0]" :data-state="word[1]"><template v-if="S.frozen"><icon name="pause" :size="12"></icon> Frozen at {{ clock(S.now) }}, {{ S.missed }} changes since <button class="quiet link" @click="freeze">Go on</button></template><template v-else><i class="dot" aria-hidden="true"></i><b>{{ word[1] }}</b> <span class="dim num">{{ word[2] }}</span></template></span>`,
};

export const Shell = {
  components: { ...parts, Pill },
  data: () => ({ open: "", groups: [], text: "", found: [], at: 0 }),
  props: { groups: Array },
  computed: {
    pages: () => PAGES,
    more: () => MORE,
    S: () => S,
    R: () => R,
    policy: () => (S.one.group?.policy || "").toUpperCase(),
    counts() {
      return { pools: Object.keys(S.pools).length, inflight: S.one.totals?.in_flight, endpoints: Object.keys(S.endpoints).length, gateways: S.one.totals?.gateways };
    },
    letters: () => initials(S.me.name),
    current() {
      return { requests: "inflight" }[R.page] || R.page;
    },
  },
  mounted() {
    document.addEventListener("click", this.outside);
  },
  unmounted() {
    document.removeEventListener("click", this.outside);
  },
  methods: {
    href,
    count,
    outside(event) {
      if (!event.target.closest?.(".drop")) this.open = "";
    },
    theme() {
      const now = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      document.documentElement.dataset.theme = now;
      try {
        localStorage.setItem("fd-theme", now);
      } catch {
        // the choice then holds for this page only
      }
    },
    keys() {
      openDialog("keys");
    },
    look() {
      const text = this.text.trim().toLowerCase();
      this.at = 0;
      if (!text) return (this.found = []);
      const found = [];
      for (const [page, table, word] of [["pools", S.pools, "pool"], ["endpoints", S.endpoints, "endpoint"], ["gateways", S.gateways, "gateway"], ["requests", S.leases, "request"]])
        for (const id of Object.keys(table)) if (found.length < 12 && id.toLowerCase().includes(text)) found.push({ page, id, word });
      if (/^[\w.-]{8,128}$/.test(this.text.trim()) && !found.some((each) => each.page === "requests")) found.push({ page: "requests", id: this.text.trim(), word: "request" });
      return (this.found = found);
    },
    step(by) {
      this.at = Math.max(0, Math.min(this.found.length - 1, this.at + by));
    },
    choose(one) {
      if (!one) return;
      this.text = "";
      this.found = [];
      this.open = "";
      document.activeElement?.blur();
      go(one.page, one.id);
    },
  },
  template: `
<header class="bar">
  <a class="brand" :href="href('overview')" aria-label="Studio, overview"><icon name="mark" :size="20" class="t-work"></icon><b>Studio</b></a>
  <span class="drop"><button class="group" :aria-expanded="open === 'group'" @click="open = open === 'group' ? '' : 'group'"><span class="dim">Group</span> <b><name :text="S.group" :most="22"></name></b> <span class="dim">{{ policy }}</span> <icon name="down" :size="14"></icon></button>
    <ul v-if="open === 'group'" class="menu"><li v-for="name in groups" :key="name"><a :href="S.prefix + '/g/' + encodeURIComponent(name)"><bdi>{{ name }}</bdi></a></li><li><a :href="href('config')">Config of {{ S.group }}</a></li><li><a :href="href('system')">System</a></li><li><a :href="href('signals')">Reading the signals</a></li></ul></span>
  <nav aria-label="Pages"><a v-for="[page, label] in pages" :key="page" :href="href(page)" :aria-current="current === page ? 'page' : null">{{ label }}<span v-if="counts[page] !== undefined && counts[page] !== null" class="n">{{ count(counts[page]) }}</span></a></nav>
  <span class="push"></span>
  <pill></pill>
  <span v-if="S.me.anonymous && S.me.writes" class="note-pill" title="Nobody is asked for a key, and everybody may change things">no sign-in</span>
  <span class="drop search"><label class="find"><icon name="search" :size="15"></icon><span class="hide">Find a pool, gateway, endpoint or request</span><input id="find" type="search" v-model="text" placeholder="Find" autocomplete="off" spellcheck="false" @input="look" @keydown.down.prevent="step(1)" @keydown.up.prevent="step(-1)" @keydown.enter.prevent="choose(found[at])" @keydown.esc="text = ''; found = []"><kbd>/</kbd></label>
    <ul v-if="found.length" class="menu" role="listbox" aria-label="Found"><li v-for="(one, n) in found" :key="one.page + one.id" role="option" :aria-selected="n === at"><button @click="choose(one)"><name :text="one.id" :most="40"></name> <span class="dim">{{ one.word }}</span></button></li></ul></span>
  <button class="quiet icon" @click="theme" aria-label="Light or dark" title="Light or dark (t)"><icon name="theme"></icon></button>
  <span class="drop"><button class="me" :aria-label="'Signed in as ' + S.me.name + ', ' + S.me.role" :aria-expanded="open === 'me'" @click="open = open === 'me' ? '' : 'me'">{{ letters }}</button>
    <div v-if="open === 'me'" class="menu"><p><b><bdi>{{ S.me.name }}</bdi></b><br><span class="dim">role {{ S.me.role }}</span></p><p v-if="S.me.why" class="dim">{{ S.me.why }}</p><button @click="keys">Keys (?)</button><form v-if="!S.me.anonymous" method="post" :action="S.prefix + '/sign-out'"><button type="submit">Sign out</button></form></div></span>
</header>`,
};

export const Tabs = {
  components: parts,
  data: () => ({ open: false }),
  computed: {
    first: () => PAGES.slice(0, 4),
    rest: () => [...PAGES.slice(4), ...MORE],
    R: () => R,
  },
  methods: { href },
  template: `<nav class="tabs" aria-label="Pages"><a v-for="[page, label, icon] in first" :key="page" :href="href(page)" :aria-current="R.page === page ? 'page' : null"><icon :name="icon" :size="20"></icon>{{ label }}</a><button :aria-expanded="open" @click="open = !open"><icon name="more" :size="20"></icon>More</button><div v-if="open" class="menu" @click="open = false"><a v-for="[page, label] in rest" :key="page" :href="href(page)">{{ label }}</a></div></nav>`,
};

// What cannot be overlooked: Valkey is away, or Studio itself.
export const Banner = {
  components: parts,
  computed: {
    S: () => S,
    state: () => freshness.value,
    status: () => status.value,
    stale: () => isStale.value,
  },
  methods: { clock },
  template: `
<div class="live hide" role="status" aria-live="polite">{{ state === 'away' ? 'Valkey does not answer.' : state === 'lost' ? 'Studio does not answer.' : '' }}</div>
<div v-if="state === 'away'" class="banner t-broken"><icon name="octagon"></icon><p>Valkey does not answer since {{ clock(status.since_ms) }} (<bdi>{{ status.problem }}</bdi><template v-if="status.address"> · {{ status.address }}</template>). Gateways finish what they hold; new work gets 503. <template v-if="status.seen_ms">Figures are as of {{ clock(status.seen_ms) }}.</template><template v-else>Nothing was read yet.</template> History still works.</p></div>
<div v-else-if="state === 'lost'" class="banner t-broken"><icon name="octagon"></icon><p>Studio does not answer since {{ clock(S.heard) }}. Trying again… Figures are from then.</p></div>
<div v-else-if="state === 'stale'" class="banner t-hold"><icon name="clock"></icon><p>Nothing was heard since {{ clock(S.heard) }}. Figures are from then.</p></div>`,
};

export { A };
