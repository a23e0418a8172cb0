--- Which replies their producers have handed over, and when: one record an acknowledgement, so that delivery can be
-- measured. Fields: at_ms, producer, and `frames`, the header lines of the terminal frames (state/replies.lua).
local clock = require("state.clock")
local keys = require("state.keys")
local schema = require("schema")

local deliveries = {}

--- Append a record of these header lines, unless there are none.
function deliveries.append(root, producer, lines)
  if #lines == 0 then return end
  server.call("XADD", keys.of(root, "deliveries"), "MAXLEN", "~", schema.limits.deliveries_kept, "*",
    "at_ms", clock.now_ms(), "producer", producer, "frames", table.concat(lines, "\n"))
end

return deliveries
