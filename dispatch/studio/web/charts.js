// Two small charts in SVG: stacked bars, and lines. A gap is a gap; nothing moves by itself.
import { h } from "vue";
import { clock, count, day, duration } from "./format.js";

const W = 600;
const H = 190;
const BOX = { left: 58, right: 70, top: 18, bottom: 22 };

function nice(top) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, top)));
  return [1, 2, 3, 5, 10].map((n) => n * ten).find((n) => n >= top) || top;
}

const across = (at, from, to, right = BOX.right) => BOX.left + ((at - from) / Math.max(1, to - from)) * (W - BOX.left - right);

function times(from, to, right) {
  const long = to - from > 36 * 3600e3;
  return Array.from({ length: 6 }, (_, n) => {
    const at = from + ((to - from) * n) / 6;
    return h("text", { x: across(at, from, to, right), y: H - 5, class: "tick", "text-anchor": "middle" }, long ? day(at).slice(5) : clock(at).slice(0, 5));
  });
}

const rule = (y) => h("line", { x1: BOX.left, x2: W - 6, y1: y, y2: y, class: "rule" });

export const Bars = {
  props: { steps: Array, from: Number, to: Number, step: Number, kinds: Array, marks: Array },
  render() {
    const sum = (one) => this.kinds.reduce((total, [key]) => total + one[key], 0);
    const top = nice(Math.max(1, ...this.steps.map(sum)));
    const y = (n) => H - BOX.bottom - (n / top) * (H - BOX.top - BOX.bottom);
    const wide = Math.max(1, ((W - BOX.left - 6) * this.step) / Math.max(1, this.to - this.from) - 1.5);
    const cells = [0, top / 2, top].flatMap((n) => [rule(y(n)), h("text", { x: BOX.left - 8, y: y(n) + 4, class: "tick", "text-anchor": "end" }, count(n))]);
    for (const one of this.steps) {
      let below = 0;
      for (const [key, , tone] of [...this.kinds].reverse()) {
        if (!one[key]) continue;
        cells.push(h("rect", { x: across(one.at, this.from, this.to, 6), width: wide, y: y(below + one[key]), height: Math.max(1, y(below) - y(below + one[key])), class: `fill t-${tone}` }));
        below += one[key];
      }
    }
    let free = 0; // where the next word has room
    for (const [at, word] of this.marks || []) {
      const x = across(at, this.from, this.to, 6);
      cells.push(h("line", { x1: x, x2: x, y1: BOX.top - 2, y2: H - BOX.bottom, class: "mark" }));
      const half = word.length * 2.8;
      const middle = Math.min(W - half - 4, Math.max(BOX.left + half, x));
      if (middle - half < free) continue;
      free = middle + half + 8;
      cells.push(h("text", { x: middle, y: 11, class: "tick", "text-anchor": "middle" }, word));
    }
    const words = this.kinds.map(([key, word]) => `${word} ${count(this.steps.reduce((total, one) => total + one[key], 0))}`).join(", ");
    return h("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `endings over time: ${words}` }, [...cells, ...times(this.from, this.to, 6)]);
  },
};

export const Curves = {
  props: { steps: Array, from: Number, to: Number, series: Array, log: Boolean, top: Number, small: Boolean },
  render() {
    const all = this.steps.flatMap((one) => this.series.map(([key]) => one[key])).filter((n) => n !== null && n !== undefined);
    const told = (n) => (this.log ? duration(n) : n.toFixed(2));
    let [low, high] = this.log ? [Math.log10(Math.max(1, Math.min(...all, 1000))), Math.log10(Math.max(10, ...all))] : [0, this.top || Math.max(1, ...all)];
    if (this.log) [low, high] = [Math.floor(low), Math.max(Math.floor(low) + 1, Math.ceil(high))];
    const y = (n) => H - BOX.bottom - (((this.log ? Math.log10(Math.max(1, n)) : n) - low) / Math.max(1e-9, high - low)) * (H - BOX.top - BOX.bottom);
    const marks = this.log ? Array.from({ length: high - low + 1 }, (_, n) => 10 ** (low + n)) : [0, high / 2, high];
    const cells = marks.flatMap((n) => [rule(y(n)), h("text", { x: BOX.left - 8, y: y(n) + 4, class: "tick", "text-anchor": "end" }, told(n))]);
    const ends = [];
    for (const [key, tone, word, thin] of this.series) {
      const points = this.steps.filter((one) => one[key] !== null && one[key] !== undefined).map((one) => [across(one.at, this.from, this.to), y(one[key])]);
      if (!points.length) continue;
      cells.push(h("path", { class: `line t-${tone}`, "stroke-dasharray": thin ? "3 3" : null, d: "M" + points.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L") }));
      const last = points[points.length - 1];
      if (points.length === 1) cells.push(h("circle", { cx: last[0], cy: last[1], r: 2.5, class: `fill t-${tone}` }));
      const value = this.steps.filter((one) => one[key] !== null && one[key] !== undefined).pop()[key];
      if (!thin) ends.push([last[0] + 6, last[1], `${this.log ? word + " " : ""}${told(value)}`]);
    }
    ends.sort((a, b) => a[1] - b[1]).forEach((end, n) => (end[1] = Math.max(end[1], n ? ends[n - 1][1] + 13 : 0)));
    for (const [x, at, text] of ends) cells.push(h("text", { x: Math.min(x, W - 66), y: at + 4, class: "end" }, text));
    return h("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": ends.map((end) => end[2]).join(", ") || "nothing was measured" }, [...cells, ...times(this.from, this.to)]);
  },
};
