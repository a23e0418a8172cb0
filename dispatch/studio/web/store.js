// What the page knows: tables of rows by id, kept in step by patches, and the clock that ages tick by.
import { reactive, computed } from "vue";

const DELAYED_MS = 3000;
const STALE_MS = 10_000;

export const S = reactive({
  loaded: false,
  prefix: "",
  group: "",
  me: { name: "", role: "observe", writes: false, anonymous: true, why: "" },
  one: {}, // singles: status, group, totals
  pools: {},
  endpoints: {},
  gateways: {},
  leases: {},
  events: {},
  attention: {},
  sparks: {}, // waiting of the last 15 minutes by pool, a point each 5 s
  now: Date.now(), // the server's clock, as it ticks here
  heard: 0, // when a patch came last, in this browser's clock
  silence: 0,
  connected: true,
  frozen: false,
  missed: 0,
  asks: 0,
});

let offset = 0; // server's clock minus ours
let held = []; // patches that came while frozen
let emit = () => {};
const waiting = new Map();

export function begin(props, send) {
  emit = send;
  Object.assign(S, { prefix: props.prefix, group: props.group, me: { ...S.me, ...props.me } });
}

// { full, at, set: { table: { id: fields } }, del: { table: [ids] }, sparks, tick }
export function take(patch) {
  S.heard = Date.now();
  S.silence = 0;
  if (S.frozen && !patch.full) {
    held.push(patch);
    for (const rows of Object.values(patch.set || {})) S.missed += Object.keys(rows).length;
    return;
  }
  apply(patch);
}

function apply(patch) {
  if (patch.at) {
    offset = patch.at - Date.now();
    S.now = patch.at;
  }
  if (patch.full) {
    for (const table of ["pools", "endpoints", "gateways", "leases", "events", "attention"]) S[table] = {};
    S.sparks = patch.sparks || {};
    held = [];
  }
  for (const [table, rows] of Object.entries(patch.set || {})) {
    const known = S[table];
    for (const [id, fields] of Object.entries(rows)) {
      if (Object.hasOwn(known, id)) Object.assign(known[id], fields);
      else known[id] = fields;
    }
  }
  for (const [table, ids] of Object.entries(patch.del || {})) for (const id of ids) delete S[table][id];
  if (patch.tick) sample();
  if (patch.full) S.loaded = true;
}

const POINTS = 180;

function sample() {
  for (const [id, pool] of Object.entries(S.pools)) {
    const line = S.sparks[id] || (S.sparks[id] = []);
    line.push(pool.waiting);
    if (line.length > POINTS) line.shift();
  }
}

export function freeze() {
  S.frozen = !S.frozen;
  S.missed = 0;
  if (!S.frozen) for (const patch of held.splice(0)) apply(patch);
}

// Ask Studio for something; resolves with the answer, rejects with its sentence.
export function ask(what, args = {}) {
  const n = ++S.asks;
  return new Promise((resolve, reject) => {
    waiting.set(n, { resolve, reject });
    emit({ n, what, args });
  });
}

export function answer({ n, ok, result }) {
  const call = waiting.get(n);
  if (!call) return;
  waiting.delete(n);
  if (ok) call.resolve(result);
  else call.reject(Object.assign(new Error(result.message), result));
}

export function tick() {
  S.silence = S.heard ? Date.now() - S.heard : 0;
  const socket = window.socket;
  S.connected = socket ? socket.connected : true;
  if (!S.frozen && !isStale.value) S.now = Date.now() + offset;
}

export const status = computed(() => S.one.status || { state: "loading" });

// fresh, delayed, stale, lost (the browser lost Studio), away (Studio lost Valkey), loading, or a word that fills the page
export const freshness = computed(() => {
  if (!S.connected && S.silence > 1500) return "lost";
  if (!S.loaded) return "loading";
  const state = status.value.state;
  if (state !== "fresh") return state;
  if (S.silence > STALE_MS) return "stale";
  return S.silence > DELAYED_MS ? "delayed" : "fresh";
});

export const isStale = computed(() => ["lost", "stale", "away"].includes(freshness.value));
export const canAct = computed(() => S.me.writes && !isStale.value && !S.frozen && freshness.value !== "readonly");

export function whyNotAct() {
  if (!S.me.writes) return S.me.why || "You can look, not change. Needs the role admin.";
  if (isStale.value) return "Not while figures are old.";
  if (S.frozen) return "Not while the page is frozen (z).";
  return "";
}

if (typeof window !== "undefined") window.fdStudio = { take, answer, S };
