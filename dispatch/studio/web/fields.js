// What can be edited in a form: fields of a config document with their kind, bounds as the library has them, and words.
const whole = (name, label, low, high, hint = "") => ({ name, label, kind: "whole", low, high, hint });
const optional = (name, label, low, high, hint = "") => ({ name, label, kind: "optional", low, high, hint: hint || "empty = no bound" });
const word = (name, label, words, hint = "") => ({ name, label, kind: "word", words, hint });
const text = (name, label, hint = "") => ({ name, label, kind: "text", hint });
const flag = (name, label, hint = "") => ({ name, label, kind: "flag", hint });

export const FIELDS = {
  group: [
    whole("total_concurrent_dispatch", "Slots of the group", 0, 100000, "requests that run at once, over all gateways"),
    word("policy", "Policy", ["drr", "fifo"], "drr: by weight; fifo: arrival order over all pools"),
    whole("max_queued", "Waiting at most", 1, 2 ** 40, "requests, over all pools"),
    whole("cost_max", "Highest cost", 1, 1000000, "units; bounds what one request may cost its pool"),
    whole("lease_ms", "Lease, ms", 300, 3600000, "how long a dead gateway's requests stay taken"),
    whole("retry_budget_percent", "Retries, % of first attempts", 0, 100),
  ],
  pools: [
    whole("quantum", "Weight", 1, 1000000, "credit per round, relative to the other pools"),
    whole("min_concurrent", "Protected slots", 0, 100000, "kept for it while it has work"),
    optional("max_concurrent", "Cap", 1, 100000, "slots it may use at once; empty = the group's"),
    optional("max_burst_per_visit", "Burst", 1, 100000, "launches in one visit; empty = no bound"),
    whole("max_queue_depth", "Waiting at most", 0, 2 ** 40, "requests; beyond it submits are refused"),
    { name: "endpoint", label: "Endpoint", kind: "endpoint", hint: "where its requests run" },
    word("delivery", "Delivery", ["at_most_once", "at_least_once"], "what becomes of requests of a gateway that died"),
    optional("max_attempts", "Attempts at most", 1, 100, "empty = as delivery says"),
    word("on_open", "While the breaker is open", ["queue", "reject"]),
    flag("enabled", "Takes new requests"),
    text("display_name", "Display name"),
  ],
  endpoints: [
    text("url", "Address", "base URL of an OpenAI-compatible API; no keys in it"),
    text("api_key_env", "Key variable", "name of the variable that holds the key, not the key"),
    optional("max_concurrent", "Cap", 1, 100000, "slots at once over all pools; empty = no bound"),
    whole("breaker_failures", "Failures that open the breaker", 1, 1000000),
    whole("open_ms", "Open for, ms", 10, 3600000),
    whole("close_after", "Good probes that close it", 1, 1000),
    word("gate", "Gate", ["none", "vllm", "sglang", "tgi", "llamacpp", "custom"], "engine metrics that hold launches back"),
    whole("gate_target", "Engine queue target", 1, 1000000),
    whole("gate_token_ms", "ms per token, limit", 1, 3600000),
    word("gate_fail", "Without a fresh sample", ["open", "closed"]),
  ],
};

export const ID_OF = { pools: "pool_id", endpoints: "endpoint_id" };

// What is written in a field, as the document has it; an error says what is allowed.
export function read(field, value) {
  const typed = String(value ?? "").trim();
  if (field.kind === "flag") return { value: Boolean(value) };
  if (field.kind === "whole" || field.kind === "optional") {
    if (field.kind === "optional" && typed === "") return { value: null };
    const n = Number(typed);
    if (!/^\d+$/.test(typed) || n < field.low || n > field.high) return { problem: `a whole number from ${field.low} to ${field.high}` };
    return { value: n };
  }
  if (field.kind === "text" && typed.length > 2048) return { problem: "text of at most 2048 characters" };
  return { value: typed };
}
