--- What somebody or something changed: config generations, pauses. Bounded; operators read it.
local keys = require("state.keys")
local schema = require("schema")

local events = {}

--- Append an event. `facts` is a flat list of names and values.
function events.append(root, now, kind, facts)
  server.call("XADD", keys.of(root, "events"), "MAXLEN", "~", schema.limits.events_kept, "*",
    "kind", kind, "at_ms", now, unpack(facts))
end

return events
