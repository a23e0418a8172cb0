// Icons by the word they stand for. Shape goes with colour: neither stands alone.
import { h } from "vue";

const line = (d) => [["path", { d }]];
const SHAPES = {
  chevrons: line("M4 4l4 4-4 4M8.5 4l4 4-4 4"),
  bars: [["path", { d: "M2.5 3.5h11" }], ["path", { d: "M4.5 6.5v6M8 6.5v6M11.5 6.5v6" }]],
  hourglass: line("M4 2.5h8M4 13.5h8M5 2.5v2.2L8 8l3-3.3V2.5M5 13.5v-2.2L8 8l3 3.3v2.2"),
  octagon: [["path", { d: "M5.5 2h5L14 5.5v5L10.5 14h-5L2 10.5v-5z" }], ["path", { d: "M6 6l4 4M10 6l-4 4" }]],
  pause: line("M5.5 3.5v9M10.5 3.5v9"),
  drain: line("M8 2.5v7M4.8 6.5L8 9.8l3.2-3.3M3 13h10"),
  dashed: [["circle", { cx: 8, cy: 8, r: 5.8, "stroke-dasharray": "2.4 2" }], ["path", { d: "M6.4 6.6c0-2.2 3.3-2.1 3.3 0 0 1.3-1.7 1.2-1.7 2.5M8 11.2v.1" }]],
  idle: [["circle", { cx: 8, cy: 8, r: 2 }]],
  person: [["circle", { cx: 8, cy: 5.5, r: 2.6 }], ["path", { d: "M3 13.5c.4-3 2.4-4.3 5-4.3s4.6 1.3 5 4.3" }]],
  alert: line("M8 3v6.2M8 12.2v.4"),
  ok: line("M3.2 8.4l3.2 3.2 6.4-7"),
  cross: line("M4 4l8 8M12 4l-8 8"),
  clock: [["circle", { cx: 8, cy: 8, r: 5.7 }], ["path", { d: "M8 4.8V8l2.2 1.6" }]],
  barred: [["circle", { cx: 8, cy: 8, r: 5.7 }], ["path", { d: "M4 12L12 4" }]],
  gone: line("M1.8 8h3.4l1.6-3 2.4 6 1.6-3h3.4"),
  search: [["circle", { cx: 7, cy: 7, r: 4.2 }], ["path", { d: "M10.2 10.2L14 14" }]],
  theme: [["circle", { cx: 8, cy: 8, r: 5.7 }], ["path", { d: "M8 2.3v11.4a5.7 5.7 0 000-11.4z", fill: "currentColor" }]],
  more: [["circle", { cx: 3.5, cy: 8, r: 0.9, fill: "currentColor" }], ["circle", { cx: 8, cy: 8, r: 0.9, fill: "currentColor" }], ["circle", { cx: 12.5, cy: 8, r: 0.9, fill: "currentColor" }]],
  down: line("M4 6.2L8 10l4-3.8"),
  overview: line("M2.5 4h11M2.5 8h7M2.5 12h11"),
  pools: [["path", { d: "M2.5 3.5h11" }], ["path", { d: "M4.5 6.5v6M8 6.5v6M11.5 6.5v6" }]],
  copy: line("M5.5 5.5h7v7h-7zM3.5 10.5v-7h7"),
  mark: [["path", { d: "M2 4h4.2L9 8 6.2 12H2M2 8h9", "stroke-width": 1.9 }], ["circle", { cx: 13.4, cy: 8, r: 1.6, fill: "currentColor" }]],
  key: [["circle", { cx: 5.5, cy: 8, r: 2.8 }], ["path", { d: "M8.3 8h5.2M11.6 8v2.4" }]],
};

export const Icon = {
  props: { name: String, label: String, size: { default: 16 } },
  render() {
    const shapes = SHAPES[this.name] || SHAPES.dashed;
    const heard = this.label ? { role: "img", "aria-label": this.label } : { "aria-hidden": "true" };
    return h("svg", { class: "ico", width: this.size, height: this.size, viewBox: "0 0 16 16", fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-linecap": "round", "stroke-linejoin": "round", ...heard }, shapes.map(([tag, facts]) => h(tag, facts)));
  },
};

// An icon on a tinted square, as rows begin with it.
export const Badge = {
  components: { Icon },
  props: { name: String, tone: { default: "grey" }, label: String },
  template: `<span class="badge" :class="'t-' + tone" :title="label"><icon :name="name" :label="label"></icon></span>`,
};
