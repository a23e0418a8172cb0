// Numbers, durations and times as people read them. Pure. `null` is a value that should be known and is not.

const THIN = "\u202f";

export const UNKNOWN = "unknown";
export const NONE = "–";

export function count(n) {
  if (n === null || n === undefined) return UNKNOWN;
  const [whole, part] = String(Math.abs(n)).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, THIN);
  return (n < 0 ? "−" : "") + grouped + (part ? "." + part : "");
}

// A duration as pairs of number and unit: 136 ms, 5.8 s, 48 s, 2 m 22 s, 3 h 05 m, 2 d 9 h.
export function durationParts(ms) {
  if (ms < 0) ms = 0;
  if (ms === 0) return [["0", "ms"]];
  if (ms < 1) return [["< 1", "ms"]];
  if (ms < 999.5) return [[String(Math.round(ms)), "ms"]];
  if (ms < 9950) return [[(ms / 1000).toFixed(1), "s"]];
  const s = Math.round(ms / 1000);
  if (s < 60) return [[String(s), "s"]];
  if (s < 3600) return [[String(Math.floor(s / 60)), "m"], [String(s % 60).padStart(2, "0"), "s"]];
  const m = Math.floor(s / 60);
  if (m < 1440) return [[String(Math.floor(m / 60)), "h"], [String(m % 60).padStart(2, "0"), "m"]];
  const h = Math.floor(m / 60);
  return [[String(Math.floor(h / 24)), "d"], [String(h % 24), "h"]];
}

export function duration(ms) {
  if (ms === null || ms === undefined) return UNKNOWN;
  return durationParts(ms).map((pair) => pair.join(" ")).join(" ");
}

export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return UNKNOWN;
  if (perSecond === 0) return "0/s";
  if (perSecond >= 100) return count(Math.round(perSecond)) + "/s";
  if (perSecond >= 0.1) return perSecond.toFixed(1) + "/s";
  const perMinute = perSecond * 60;
  return perMinute >= 0.1 ? perMinute.toFixed(1) + "/min" : "< 0.1/min";
}

// One decimal under 10, else whole; what is not 0 never becomes 0.
export function percent(share) {
  if (share === null || share === undefined) return UNKNOWN;
  const p = share * 100;
  if (p === 0) return "0 %";
  if (p < 0.1) return "< 0.1 %";
  return (p < 9.95 ? p.toFixed(1) : String(Math.round(p))) + " %";
}

export function tokens(n) {
  if (n === null || n === undefined) return UNKNOWN;
  if (n < 1000) return String(Math.round(n));
  if (n < 999_500) return (n / 1000).toFixed(n < 99_950 ? 1 : 0) + "k";
  return (n / 1e6).toFixed(1) + "M";
}

export function bytes(n) {
  if (n === null || n === undefined) return UNKNOWN;
  if (n < 1024) return n + " B";
  if (n < 1024 * 1024) return (n / 1024).toFixed(1) + " KiB";
  return (n / 1024 / 1024).toFixed(1) + " MiB";
}

const two = (n) => String(n).padStart(2, "0");

export function clock(ms, local = false, tenths = false) {
  if (ms === null || ms === undefined) return UNKNOWN;
  const d = new Date(ms);
  const [h, m, s] = local
    ? [d.getHours(), d.getMinutes(), d.getSeconds()]
    : [d.getUTCHours(), d.getUTCMinutes(), d.getUTCSeconds()];
  const part = tenths ? "." + Math.floor((((ms % 1000) + 1000) % 1000) / 100) : "";
  return `${two(h)}:${two(m)}:${two(s)}${part}`;
}

export function iso(ms) {
  return ms === null || ms === undefined ? UNKNOWN : new Date(ms).toISOString();
}

export function day(ms, local = false) {
  const d = new Date(ms);
  return local
    ? `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`
    : d.toISOString().slice(0, 10);
}

// Names are cut in the middle, so that both the kind and the number at the end can be read.
export function cut(name, most = 28) {
  if (name === null || name === undefined) return UNKNOWN;
  const cells = Array.from(name);
  if (cells.length <= most) return name;
  const head = Math.ceil((most - 1) / 2);
  return cells.slice(0, head).join("") + "…" + cells.slice(cells.length - (most - 1 - head)).join("");
}

// Request ids are long and random: the first eight say which one on a screen.
export function shortId(id) {
  return id.length > 13 ? id.slice(0, 4) + "-" + id.slice(4, 8) : id;
}

export function plural(n, one, many = one + "s") {
  return n === 1 ? one : many;
}

export function initials(name) {
  const words = (name || "?").split(/[^\p{L}\p{N}]+/u).filter(Boolean);
  return ((words[0] || "?")[0] + (words.length > 1 ? words[1][0] : "")).toUpperCase();
}

// What goes into a cell of a CSV: quoted, and never a formula.
export function csvCell(value) {
  if (value === null || value === undefined) return "";
  let text = String(value);
  if (/^[=+\-@\t\r]/.test(text)) text = "'" + text;
  return /[",\n\r']/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}
