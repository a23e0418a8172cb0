// Words, icons and colours of endings and events.
import { count } from "./format.js";

const ENDINGS = {
  succeeded: ["ok", "work", "succeeded"],
  failed: ["cross", "broken", "broke"],
  dead: ["cross", "broken", "broke"],
  lost: ["cross", "broken", "broke"],
  malformed: ["cross", "broken", "broke"],
  expired: ["clock", "hold", "too late"],
  rejected: ["barred", "hold", "too late"],
  cancelled: ["barred", "grey", "caller left"],
  producer_gone: ["gone", "grey", "caller left"],
  reply_dropped: ["gone", "grey", "caller left"],
};

export function ending(word) {
  const [icon, tone, kind] = ENDINGS[word] || ["dashed", "grey", "unknown"];
  return { icon, tone, kind, word: word || "unknown" };
}

const who = (facts) => facts.actor || "somebody";

// What happened, as a sentence in parts: [text, bold?] pairs, a line below, and how it looks.
export function told({ kind, facts }) {
  switch (kind) {
    case "config":
      return {
        icon: "person", tone: "person",
        parts: [[who(facts), true], [` changed ${count(Number(facts.changed))} ${facts.changed === "1" ? "field" : "fields"} of the config`]],
        more: `generation ${facts.generation}` + (facts.reason ? ` · “${facts.reason}”` : ""),
      };
    case "pause":
    case "resume":
    case "drain":
      return {
        icon: "person", tone: "person",
        parts: [[who(facts), true], [` ${{ pause: "paused", resume: "resumed", drain: "drains" }[kind]} `], [facts.pool || "a pool", true]],
        more: facts.reason ? `“${facts.reason}”` : "no reason was given",
      };
    case "breaker": {
      const word = { open: "opened", half_open: "probes", closed: "closed" }[facts.to] || facts.to;
      return {
        icon: facts.to === "closed" ? "chevrons" : "octagon", tone: facts.to === "closed" ? "work" : "broken",
        parts: [["Breaker of "], [facts.endpoint || "an endpoint", true], [` ${word}`]],
        more: facts.reason || "",
      };
    }
    case "key":
      return { icon: "key", tone: "person", parts: [[who(facts), true], [` ${facts.action === "revoke" ? "revoked" : "created"} key `], [facts.key || "", true]], more: "" };
    case "dead":
      return { icon: "person", tone: "person", parts: [[who(facts), true], [` ${facts.action || "changed"} a dead request`]], more: facts.request || facts.request_id || "" };
    case "repair":
      return { icon: "person", tone: "person", parts: [[who(facts), true], [` repaired ${facts.what || ""} `], [facts.name || "", true]], more: [facts.field, facts.seen && `${facts.seen} → ${facts.value}`].filter(Boolean).join(": ") };
    default:
      return { icon: "alert", tone: "grey", parts: [[kind || "unknown event"]], more: Object.entries(facts || {}).map(([key, value]) => `${key} ${value}`).join(", ") };
  }
}

export const RANK = { broken: 0, hold: 1, person: 2, work: 4, grey: 5 };
