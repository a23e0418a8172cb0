--- What somebody or something changed: config generations, pauses. Bounded; operators read it.
local keys = require("state.keys")
local schema = require("schema")

local events = {}

--- Append an event. `facts` is a flat list of names and values.
function events.append(root, now, kind, facts)
  server.call("XADD", keys.of(root, "events"), "MAXLEN", "~", schema.limits.events_kept, "*",
    "kind", kind, "at_ms", now, unpack(facts))
end

--- The id of the newest event, "" when there is none.
function events.newest(root)
  local found = server.call("XREVRANGE", keys.of(root, "events"), "+", "-", "COUNT", 1)[1]
  return found and found[1] or ""
end

return events
