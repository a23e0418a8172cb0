// The root of every page: reads the address, keeps the clock, knows the keys, and shows the page that is meant.
import { S, answer, ask, begin as beginStore, canAct, freeze, freshness, isStale, status, take, tick } from "./store.js";
import { R, begin as beginRouter, go, href, onLink, setQuery } from "./router.js";
import { parts } from "./parts.js";
import { A, ActsHost, openDialog, openMenu } from "./acts.js";
import { Banner, Shell, Tabs } from "./shell.js";
import { Overview } from "./overview.js";
import { Pool, Pools } from "./pools.js";
import { InFlight, Request } from "./requests.js";
import { Endpoints, Gateways } from "./fleet.js";
import { Changes, Config } from "./changes.js";
import { Signals, System } from "./system.js";
import { History } from "./history.js";
import { Away, Groups, SignIn } from "./doors.js";

const GO = { o: "overview", p: "pools", i: "inflight", h: "history", e: "endpoints", g: "gateways", c: "changes" };
const TITLES = { overview: "Overview", pools: "Pools", inflight: "In flight", requests: "Request", history: "History", endpoints: "Endpoints", gateways: "Gateways", changes: "Changes", config: "Config", system: "System", signals: "Signals" };

function quiet() {
  try {
    return localStorage.getItem("fd-keys") === "off";
  } catch {
    return false;
  }
}

const rows = () => [...document.querySelectorAll(".content [data-row], .content .lane[data-id]")].filter((row) => row.offsetParent);

export default {
  components: { ...parts, ActsHost, Banner, Shell, Tabs, Overview, Pool, Pools, InFlight, Request, Endpoints, Gateways, Changes, Config, System, Signals, History, Away, Groups, SignIn },
  props: { prefix: String, group: String, groups: Array, view: String, problem: String, me: Object },
  emits: ["ask"],
  data: () => ({ going: false }),
  computed: {
    page: () => R.page,
    id: () => R.id,
    state: () => freshness.value,
    stale: () => isStale.value,
    status: () => status.value,
    S: () => S,
    view_() {
      const { page, id } = this;
      if (page === "pools") return id ? "Pool" : "Pools";
      return { inflight: "InFlight", requests: "Request", endpoints: "Endpoints", gateways: "Gateways", history: "History", changes: "Changes", config: "Config", system: "System", signals: "Signals" }[page] || "Overview";
    },
  },
  watch: {
    page: { immediate: true, handler: "titled" },
    id: "titled",
  },
  created() {
    beginStore({ prefix: this.prefix, group: this.group, me: this.me || {} }, (asked) => this.$emit("ask", asked));
    beginRouter();
    this.titled();
    window.fdStudio = Object.assign(window.fdStudio || {}, {
      take, answer, ask, S,
      greet: (me) => Object.assign(S.me, me),
      signedOut: () => location.reload(),
    });
  },
  mounted() {
    this.ticking = setInterval(tick, 1000);
    this.soon = setInterval(() => (S.silence = S.heard ? Date.now() - S.heard : 0), 200);
    document.addEventListener("click", onLink);
    document.addEventListener("keydown", this.key);
  },
  unmounted() {
    clearInterval(this.ticking);
    clearInterval(this.soon);
    document.removeEventListener("click", onLink);
    document.removeEventListener("keydown", this.key);
  },
  methods: {
    titled() {
      document.title = [R.id, TITLES[R.page] || "", S.group, "Studio"].filter(Boolean).join(" · ");
    },
    key(event) {
      const { key, target } = event;
      const typing = target.closest?.("input, textarea, select, [contenteditable]");
      if (key === "Escape") {
        if (A.menu) A.menu = null;
        else if (typing) target.blur();
        else if (R.query.sel && !A.dialog) setQuery({ sel: "" });
        return;
      }
      if (typing || A.dialog || A.menu || event.ctrlKey || event.metaKey || event.altKey || quiet() || this.view !== "group") return;
      const done = this.going ? this.goTo(key) : this.press(key, target);
      if (done) event.preventDefault();
    },
    goTo(key) {
      this.going = false;
      if (!GO[key]) return false;
      go(GO[key]);
      return true;
    },
    press(key, target) {
      const lane = target.closest?.("[data-id]");
      const pool = lane?.dataset.id in S.pools ? lane.dataset.id : R.page === "pools" ? R.id : "";
      switch (key) {
        case "/": document.getElementById("find")?.focus(); return true;
        case "f": document.querySelector(".content input[type=search]")?.focus(); return true;
        case "g": this.going = true; setTimeout(() => (this.going = false), 1500); return true;
        case "j": case "ArrowDown": return this.step(1, target, key);
        case "k": case "ArrowUp": return this.step(-1, target, key);
        case "Enter": return lane && target === lane ? this.enter(lane) : false;
        case "z": freeze(); return true;
        case "t": document.querySelector(".bar [aria-label='Light or dark']")?.click(); return true;
        case "?": openDialog("keys"); return true;
        case ".": if (pool && lane) openMenu({ currentTarget: lane, type: "key" }, pool); return Boolean(pool && lane);
        case "e": if (pool) openDialog("edit", { list: "pools", id: pool }); return Boolean(pool);
        case "p": if (pool) openDialog("stop", { pool, action: S.pools[pool].stopped ? "resume" : "pause" }); return Boolean(pool);
        default: return false;
      }
    },
    enter(lane) {
      lane.querySelector("a[href]")?.click();
      return true;
    },
    step(by, target, key) {
      const all = rows();
      const at = all.indexOf(target.closest?.("[data-row], .lane[data-id]"));
      if (key.startsWith("Arrow") && at < 0) return false;
      const next = all[at < 0 ? 0 : Math.max(0, Math.min(all.length - 1, at + by))];
      next?.focus();
      return Boolean(next);
    },
    href,
  },
  setup: () => ({ canAct }),
  template: `
<div class="studio" :class="{ stale }" :data-fresh="state">
  <a class="skip" href="#main">To the content</a>
  <template v-if="view === 'group'">
    <shell :groups="groups"></shell>
    <banner></banner>
    <div id="main" class="content" :class="'p-' + page">
      <section v-if="state === 'mismatch'" class="panel empty-page"><h1>Another library</h1><p>{{ status.problem }}</p></section>
      <section v-else-if="state === 'unconfigured'" class="panel empty-page"><h1>{{ S.group }}</h1><p>{{ S.group }} has no pools yet. Create them with <code>dispatch config apply FILE --group {{ S.group }}</code>, or start a gateway with <code>--endpoint-url</code>.</p></section>
      <section v-else-if="!S.loaded || (state === 'loading')" class="loading" aria-busy="true"><p class="hide">Reading {{ S.group }}…</p><div class="ghost strip"></div><div class="ghost totals"></div><div class="ghost" v-for="n in 5" :key="n"></div><p class="reading">Reading {{ S.group }}…</p></section>
      <component v-else :is="view_" :key="page + '/' + id" :id="id"></component>
    </div>
    <tabs></tabs>
    <acts-host></acts-host>
  </template>
  <div v-else id="main" class="content"><sign-in v-if="view === 'sign-in'" :group="group" :problem="problem"></sign-in><away v-else-if="view === 'away'" :problem="problem"></away><groups v-else :groups="groups"></groups></div>
</div>`,
};
