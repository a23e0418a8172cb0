--- Which replies their producers have handed over, and when, so that delivery can be measured: one record for an
-- acknowledgement (for 16 of its replies at most). Fields: at_ms, producer, and `frames`, the header lines of the
-- terminal frames (state/replies.lua).
local clock = require("state.clock")
local keys = require("state.keys")
local schema = require("schema")

local deliveries = {}

-- Lines of one record: its stream is bounded in records, and so in bytes.
local LINES_MAX = 16

--- Append these header lines: one record for all of them, as long as they are not many.
function deliveries.append(root, producer, lines)
  if #lines == 0 then return end
  local now, key = clock.now_ms(), keys.of(root, "deliveries")
  for from = 1, #lines, LINES_MAX do
    local frames = table.concat(lines, "\n", from, math.min(#lines, from + LINES_MAX - 1))
    server.call("XADD", key, "MAXLEN", "~", schema.limits.deliveries_kept, "*",
      "at_ms", now, "producer", producer, "frames", frames)
  end
end

return deliveries
