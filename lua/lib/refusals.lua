--- Which refusals get a record of their own, so that a flood of them does not push everything else out of the stream:
-- the first of each second, a bounded number in the group. The others are counted by pool and reason (a bounded number
-- of those) until their second is over, then each count becomes one record. Pure; works on the group's record.
local schema = require("schema")

local refusals = {}

local function second_of(now)
  return math.floor(now / 1000)
end

--- Whether this refusal is recorded by itself; else it is counted.
function refusals.noted(group, now, pool, reason)
  local second = second_of(now)
  if group.refused_in ~= second then group.refused_in, group.refused = second, 0 end
  group.refused = group.refused + 1
  if group.refused <= schema.limits.rejected_per_second then return true end
  local counts = group.unnoted or {}
  local name, kinds = pool .. "|" .. reason, 0
  for _ in pairs(counts) do kinds = kinds + 1 end
  if not counts[name] and kinds >= schema.limits.rejected_kinds then name = "|" .. reason end
  counts[name] = (counts[name] or 0) + 1
  group.unnoted = counts
  return false
end

--- What was counted in a second that is over, as { pool, reason, count }, and forget it.
function refusals.take(group, now)
  local found = {}
  if not group.unnoted or group.refused_in == second_of(now) then return found end
  for name, count in pairs(group.unnoted) do
    local pool, reason = string.match(name, "^(.-)|(.*)$")
    found[#found + 1] = { pool = pool, reason = reason, count = count }
  end
  table.sort(found, function(a, b) return a.pool .. "|" .. a.reason < b.pool .. "|" .. b.reason end)
  group.unnoted = nil
  return found
end

return refusals
