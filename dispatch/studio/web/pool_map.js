// The pool map: one lane a pool, each a component of its own, so that a patch renders only the lanes it changes.
import { S, ask } from "./store.js";
import { R, href, setQuery } from "./router.js";
import { parts } from "./parts.js";
import { RANK } from "./words.js";
import { count, percent, rate, duration, plural } from "./format.js";
import { openMenu } from "./acts.js";

const MANY = 80;
const SOME = 12;
const TOP = 20;

export const SORTS = { attention: "Attention", waiting: "Waiting", oldest: "Oldest", weight: "Weight", name: "Name" };

const byName = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
const tell = {
  attention: (p) => [RANK[p.tone] ?? 3, p.waiting ? 0 : 1, p.oldest_ms ?? Infinity],
  waiting: (p) => [-(p.waiting ?? 0)],
  oldest: (p) => [p.oldest_ms ?? Infinity],
  weight: (p) => [-(p.weight ?? 0)],
  name: () => [],
};

export function sorted(ids, by) {
  const keys = new Map(ids.map((id) => [id, (tell[by] || tell.attention)(S.pools[id] || {})]));
  return [...ids].sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    for (let at = 0; at < x.length; at++) if (x[at] !== y[at]) return x[at] < y[at] ? -1 : 1;
    return byName(a, b);
  });
}

// What becomes of the queue at this pace.
export function pace(pool) {
  if (pool.arriving === null || pool.launched === null || pool.growth === null) return "measuring";
  if (pool.growth >= 0.05) return `growing +${rate(pool.growth)}`;
  if (pool.waiting && pool.launched === 0) return "not draining";
  if (pool.waiting && pool.growth <= -0.05) return `empty in ${duration((pool.waiting / -pool.growth) * 1000)}`;
  return "steady";
}

export const Lane = {
  components: parts,
  props: { id: String, compact: Boolean, selected: Boolean },
  computed: {
    p() {
      return S.pools[this.id];
    },
    points() {
      return S.sparks[this.id]?.slice();
    },
    link() {
      return href("pools", this.id);
    },
    share() {
      return this.p.share === null ? "unknown" : percent(this.p.share);
    },
    fair() {
      return { fair: `fair ${percent(this.p.fair)}`, all: "all it asked", paused: "paused", unknown: "measuring" }[this.p.asked];
    },
    rates() {
      const told = (n) => (n === null ? "?" : n >= 100 ? count(Math.round(n)) : n > 0 && n < 0.05 ? "<0.1" : n.toFixed(1));
      return [told(this.p.arriving), told(this.p.launched)];
    },
    pace() {
      return pace(this.p);
    },
    wide() {
      return Math.min(1, this.p.share || 0) * 100 + "%";
    },
    tick() {
      return this.p.asked === "fair" && this.p.fair !== null ? Math.min(1, this.p.fair) * 100 + "%" : null;
    },
  },
  methods: {
    menu(event) {
      openMenu(event, this.id);
    },
    plural,
  },
  template: `
<div class="lane" :class="{ compact, selected }" role="row" :data-id="id" tabindex="-1" @contextmenu.prevent="menu">
  <span class="c-pool" role="cell">
    <badge :name="p.icon" :tone="p.tone" :label="p.code.replaceAll('_', ' ')"></badge>
    <span class="two"><a :href="link" class="strong"><name :text="id"></name></a><span class="sub">weight {{ p.weight ?? 'unknown' }} · <name :text="p.endpoint" :most="22"></name></span></span>
  </span>
  <span class="c-wait two" role="cell"><b class="big"><num :n="p.waiting"></num></b>
    <span class="sub"><template v-if="p.waiting === 0 && !p.delayed">none</template><template v-else-if="p.waiting">oldest <age :at="p.oldest_ms"></age></template><template v-if="p.delayed"> +{{ p.delayed }} delayed</template></span></span>
  <span class="c-line" role="cell"><spark :points="points" :tone="p.tone" label="waiting" :height="compact ? 20 : 30"></spark></span>
  <span class="c-why two" role="cell"><span class="why" :class="'t-' + p.tone" :title="p.code">{{ p.why }}</span>
    <span class="sub">{{ p.more }}<template v-if="p.until_ms">, next {{ p.code === 'endpoint_open' ? 'probe' : 'look' }} in <age :at="p.until_ms" until></age></template></span></span>
  <span class="c-run" role="cell"><slots :used="p.in_flight" :cap="p.cap" :protected-slots="p.min" :bars="compact || big"></slots></span>
  <span class="c-share" role="cell"><span class="pair"><b>{{ share }}</b><span class="sub">{{ fair }}</span></span>
    <span class="meter t-work" role="img" :aria-label="'share ' + share + ', ' + fair"><i :style="{ width: wide }"></i><s v-if="tick" :style="{ left: tick }"></s></span></span>
  <span class="c-rate two" role="cell"><span><b>{{ rates[0] }}</b> in · <b>{{ rates[1] }}</b> out <span class="dim">/s</span></span><span class="sub">{{ pace }}</span></span>
  <span class="c-menu" role="cell"><button class="quiet icon" @click="menu" :aria-label="'Acts of ' + id" aria-haspopup="menu"><icon name="more"></icon></button></span>
</div>`,
  inject: { big: { default: false } },
};

// One cell a pool in name order, marked by shape when it does not flow.
export const Heat = {
  props: { ids: Array },
  data: () => ({ at: 0 }),
  computed: {
    cells() {
      return this.ids.map((id) => ({ id, tone: S.pools[id]?.tone || "grey", why: S.pools[id]?.why || "unknown" }));
    },
  },
  methods: {
    mark: (tone) => ({ broken: "×", hold: "=", person: "‖", grey: "", work: "" })[tone],
    move(event) {
      const width = Math.max(1, Math.floor(this.$el.clientWidth / 12));
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Enter") return setQuery({ sel: this.ids[this.at] }, { push: true });
      if (step === undefined) return undefined;
      event.preventDefault();
      this.at = Math.max(0, Math.min(this.ids.length - 1, this.at + step));
      return undefined;
    },
    choose(event) {
      const id = event.target.closest("[data-id]")?.dataset.id;
      if (id) setQuery({ sel: id }, { push: true });
    },
  },
  template: `<div class="heat" role="listbox" tabindex="0" aria-label="All pools by name; arrow keys move" :aria-activedescendant="'heat-' + at" @keydown="move" @click="choose"><i v-for="(cell, n) in cells" :key="cell.id" :id="'heat-' + n" role="option" :aria-selected="n === at" :data-id="cell.id" :class="['t-' + cell.tone, { at: n === at }]" :aria-label="cell.id + ': ' + cell.why" :title="cell.id + ': ' + cell.why">{{ mark(cell.tone) }}</i></div>`,
};

export const PoolMap = {
  components: { ...parts, Lane, Heat },
  provide() {
    return { big: this.bars };
  },
  data: () => ({ order: [], moved: false, shown: 200, SORTS }),
  computed: {
    ids: () => Object.keys(S.pools),
    sort: () => R.query.sort || "attention",
    text: () => (R.query.f || "").toLowerCase(),
    state: () => R.query.state || "",
    count() {
      return this.ids.length;
    },
    many() {
      return this.count > MANY;
    },
    compact() {
      return this.count > SOME;
    },
    bars() {
      return this.ids.some((id) => (S.pools[id].cap ?? 0) > 32);
    },
    names() {
      return [...this.ids].sort(byName);
    },
    found() {
      const { text, state } = this;
      return this.order.filter((id) => {
        const pool = S.pools[id];
        if (!pool) return false;
        if (text && !id.toLowerCase().includes(text) && !(pool.endpoint || "").toLowerCase().includes(text)) return false;
        return !state || pool.tone === state || (state === "work" && pool.tone === "grey");
      });
    },
    lanes() {
      return this.many && !this.text && !this.state ? this.found.slice(0, TOP) : this.found.slice(0, this.shown);
    },
    states() {
      const tally = { broken: 0, hold: 0, person: 0, work: 0 };
      for (const id of this.ids) tally[S.pools[id].tone === "grey" ? "work" : S.pools[id].tone]++;
      return tally;
    },
    weights: () => S.one.totals?.weights,
    mixed() {
      return new Set(this.ids.map((id) => S.pools[id].endpoint)).size > 1;
    },
    R: () => R,
  },
  watch: {
    ids: {
      immediate: true,
      handler(ids) {
        const known = new Set(this.order);
        if (!this.order.length) this.order = sorted(ids, this.sort);
        else this.order = [...this.order.filter((id) => id in S.pools), ...ids.filter((id) => !known.has(id))];
      },
    },
    sort() {
      this.again();
    },
  },
  mounted() {
    this.timer = setInterval(() => {
      if (document.hidden) return;
      const now = sorted(this.ids, this.sort);
      const seen = this.many ? TOP : this.order.length;
      this.moved = this.order.length > 0 && now.slice(0, seen).some((id, at) => id !== this.order[at]);
    }, 3000);
    if (this.many) this.fetchLines();
  },
  unmounted() {
    clearInterval(this.timer);
  },
  methods: {
    again() {
      this.order = sorted(this.ids, this.sort);
      this.moved = false;
      if (this.many) this.fetchLines();
    },
    async fetchLines() {
      try {
        const lines = await ask("lines", { pools: this.order.slice(0, 60) });
        for (const [id, line] of Object.entries(lines)) S.sparks[id] = line;
      } catch {
        // without lines a lane is still a lane
      }
    },
    choose(by) {
      setQuery({ sort: by === "attention" ? "" : by });
      this.again();
    },
    filter(event) {
      setQuery({ f: event.target.value });
    },
    only(state) {
      setQuery({ state: this.state === state ? "" : state });
    },
    clear() {
      setQuery({ f: "", state: "" });
    },
    word: (state, n) => ({ broken: `${n} broken`, hold: `${n} held`, person: `${n} paused`, work: `${n} flowing` })[state],
    plural,
    fmt: count,
  },
  template: `
<section class="panel map" :class="{ compact }" aria-label="Pools">
  <header class="panel-head">
    <h2>Pools</h2><span class="note">{{ fmt(count) }} · weights sum to {{ fmt(weights) }}</span>
    <span class="push"></span>
    <button v-if="moved" class="quiet link" @click="again">Order has changed. Sort again</button>
    <label class="find"><icon name="search" :size="14"></icon><span class="hide">Filter pools</span><input type="search" id="pool-filter" placeholder="Filter pools" :value="R.query.f || ''" @input="filter" autocomplete="off"><kbd>f</kbd></label>
    <span class="choice" role="group" aria-label="Sort by"><button v-for="(label, by) in SORTS" :key="by" :aria-pressed="sort === by" @click="choose(by)">{{ label }}</button></span>
  </header>
  <div v-if="many" class="states">
    <span role="group" aria-label="Pools by state"><button v-for="(n, word_) in states" :key="word_" :class="'t-' + word_" :aria-pressed="state === word_" @click="only(word_)">{{ word(word_, fmt(n)) }}</button></span>
    <heat :ids="names"></heat>
  </div>
  <div role="table" aria-label="Pools">
    <div class="lane lane-head" role="row">
      <span role="columnheader" class="c-pool">Pool</span><span role="columnheader" class="c-wait">Waiting</span><span role="columnheader" class="c-line">last 15 min</span><span role="columnheader" class="c-why">Why</span>
      <span role="columnheader" class="c-run">In flight<template v-if="!bars && !compact">, one cell a slot, line = protected</template><template v-else>, line = protected</template></span><span role="columnheader" class="c-share">Share of cost, 5 min</span><span role="columnheader" class="c-rate">Rate</span><span role="columnheader" class="c-menu"><span class="hide">Acts</span></span>
    </div>
    <lane v-for="id in lanes" :key="id" :id="id" :compact="compact" :selected="R.query.sel === id"></lane>
  </div>
  <p v-if="count && !found.length" class="empty">No pool matches <b>“{{ R.query.f || state }}”</b>. {{ fmt(count) }} {{ plural(count, 'pool') }} hidden. <button class="quiet link" @click="clear">Clear filter</button></p>
  <p v-else-if="many && !text && !state && found.length > lanes.length" class="empty">The {{ lanes.length }} that need attention first, of {{ fmt(count) }}. Filter, or choose a state, to see others.</p>
  <p v-else-if="found.length > lanes.length" class="empty"><button class="quiet link" @click="shown += 200">Show more of {{ fmt(found.length) }}</button></p>
</section>`,
};
