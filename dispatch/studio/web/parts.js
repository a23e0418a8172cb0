// Small pieces that every page is made of.
import { h } from "vue";
import { S, canAct, whyNotAct } from "./store.js";
import { Badge, Icon } from "./icons.js";
import { UNKNOWN, count, cut, duration, durationParts, iso, clock } from "./format.js";

// A duration with small units.
export const Dur = {
  props: { ms: Number },
  render() {
    if (this.ms === null || this.ms === undefined) return h("span", { class: "unk" }, UNKNOWN);
    const cells = durationParts(this.ms);
    return h("span", { class: "dur" }, cells.flatMap(([n, unit], at) => [at ? " " : "", n, h("i", " " + unit)]));
  },
};

// How long ago a moment of the server's clock is (or, `until`, how long it is till then). Ticks by itself.
export const Age = {
  props: { at: Number, until: Boolean },
  render() {
    if (this.at === null || this.at === undefined) return h("span", { class: "unk" }, UNKNOWN);
    const ms = this.until ? Math.max(0, this.at - S.now) : Math.max(0, S.now - this.at);
    // Whole seconds: what ticks once a second has no tenths.
    const told = this.until ? Math.ceil(ms / 1000) * 1000 : ms < 1000 ? Math.round(ms / 100) * 100 : Math.floor(ms / 1000) * 1000;
    const cells = durationParts(told >= 1000 && told < 9950 ? told : told);
    const text = told >= 1000 && told < 9950 ? [[String(told / 1000), "s"]] : cells;
    return h("span", { class: "dur", title: iso(this.at) }, text.flatMap(([n, unit], at) => [at ? " " : "", n, h("i", " " + unit)]));
  },
};

export const Num = {
  props: { n: Number },
  render() {
    const unknown = this.n === null || this.n === undefined;
    return h("span", { class: unknown ? "unk" : "num" }, count(this.n));
  },
};

// A name as text, cut in the middle, whole on hover.
export const Name = {
  props: { text: String, most: { default: 28 } },
  render() {
    const text = this.text ?? UNKNOWN;
    const shown = cut(text, this.most);
    return h("bdi", shown === text ? {} : { title: text }, shown);
  },
};

function path(points, width, height) {
  const known = points.filter((p) => p !== null && p !== undefined);
  const top = Math.max(1, ...known);
  const step = width / Math.max(1, 179);
  const from = width - (points.length - 1) * step;
  const runs = [];
  let run = [];
  points.forEach((p, at) => {
    if (p === null || p === undefined) {
      if (run.length) runs.push(run);
      run = [];
    } else run.push([from + at * step, height - 2 - (p / top) * (height - 5)]);
  });
  if (run.length) runs.push(run);
  return runs;
}

const xy = (run) => run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

function trendWords(points) {
  const known = points.filter((p) => p !== null && p !== undefined);
  if (!known.length) return UNKNOWN;
  const [first, last] = [known[0], known[known.length - 1]];
  const word = last > first * 1.1 + 1 ? "rising" : last < first * 0.9 - 1 ? "falling" : "level";
  return `${count(Math.min(...known))} to ${count(Math.max(...known))}, ${word}`;
}

// A line of up to 180 points, one each 5 s, its own scale from 0; a gap is a gap.
export const Spark = {
  props: { points: Array, tone: { default: "work" }, width: { default: 96 }, height: { default: 28 }, label: String },
  render() {
    const points = this.points || [];
    const runs = path(points, this.width, this.height);
    const last = runs.length ? runs[runs.length - 1][runs[runs.length - 1].length - 1] : null;
    const cells = [];
    for (const run of runs) {
      const d = "M" + xy(run);
      cells.push(h("path", { class: "area", d: `${d}L${run[run.length - 1][0].toFixed(1)} ${this.height}L${run[0][0].toFixed(1)} ${this.height}Z` }));
      cells.push(h("path", { class: "line", d }));
    }
    if (last) cells.push(h("circle", { cx: last[0], cy: last[1], r: 1.8 }));
    return h("svg", { class: ["spark", "t-" + this.tone], width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": `${this.label || "trend"}, 15 min: ${trendWords(points)}` }, cells);
  },
};

// One cell a slot, the protected ones underlined; bars when there are too many to count by eye.
export const Slots = {
  props: { used: Number, cap: Number, protectedSlots: Number, bars: Boolean },
  render() {
    const { used, cap } = this;
    const kept = this.protectedSlots || 0;
    const words = cap ? `${count(used)} of ${count(cap)} slots` : `${count(used)}, no cap`;
    const text = h("span", { class: "slots-n" }, cap
      ? [h("b", count(used)), h("span", { class: "dim" }, ` / ${count(cap)}`)]
      : [h("b", count(used)), h("span", { class: "dim" }, ", no cap")]);
    const label = { role: "img", "aria-label": words + (kept ? `, ${kept} protected` : "") };
    if (!cap) return h("span", { class: "slots" }, [text]);
    if (this.bars || cap > 32) {
      const share = Math.min(1, (used || 0) / cap);
      return h("span", { class: "slots" }, [
        h("span", { class: "meter", ...label }, [h("i", { style: { width: share * 100 + "%" } }), kept ? h("u", { style: { width: Math.min(1, kept / cap) * 100 + "%" } }) : null]),
        text,
      ]);
    }
    const cells = [];
    for (let at = 0; at < cap; at++) cells.push(h("i", { class: at < used ? "on" : "" }));
    return h("span", { class: "slots" }, [
      h("span", { class: "cells", ...label }, [cells, kept ? h("u", { style: { width: kept * 6.5 - 1.5 + "px" } }) : null]),
      text,
    ]);
  },
};

// A value on a track with its limit as a tick; hatched when it is unknown.
export const Gauge = {
  props: { value: Number, top: Number, tick: Number, tone: { default: "work" }, label: String },
  render() {
    const unknown = this.value === null || this.value === undefined;
    const scale = this.top || 1;
    const at = (n) => Math.min(100, (n / scale) * 100) + "%";
    return h("span", { class: ["meter", unknown ? "unknown" : "t-" + this.tone], role: "img", "aria-label": `${this.label}: ${unknown ? UNKNOWN : count(this.value)}` }, [
      unknown ? null : h("i", { style: { width: at(this.value) } }),
      !unknown && this.tick ? h("s", { style: { left: at(this.tick) } }) : null,
    ]);
  },
};

// Text that can be copied.
export const Copy = {
  components: { Icon },
  props: { text: String },
  data: () => ({ done: false }),
  methods: {
    async copy() {
      try {
        await navigator.clipboard.writeText(this.text);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(this.$refs.text);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        return;
      }
      this.done = true;
      setTimeout(() => (this.done = false), 1500);
    },
  },
  template: `<span class="copy"><code ref="text">{{ text }}</code><button class="quiet icon" @click="copy" :aria-label="'Copy ' + text"><icon :name="done ? 'ok' : 'copy'" :size="13"></icon></button></span>`,
};

// A button that is off, and says why, for whoever may not act and while figures are old.
export const Act = {
  props: { label: String, kind: { default: "" } },
  emits: ["act"],
  setup: () => ({ canAct, whyNotAct }),
  template: `<button type="button" :class="kind" :disabled="!canAct" :title="canAct ? null : whyNotAct()" @click="$emit('act')"><slot>{{ label }}</slot></button>`,
};

export const Panel = {
  props: { title: String, note: String, level: { default: 2 } },
  template: `<section class="panel"><header class="panel-head"><component :is="'h' + level">{{ title }}</component><span class="note">{{ note }}<slot name="note"></slot></span><span class="push"></span><slot name="side"></slot></header><slot></slot></section>`,
};

export const parts = { Dur, Age, Num, Name, Spark, Slots, Gauge, Copy, Act, Panel, Icon, Badge };
export const fmt = { count, duration, iso, clock, cut };
