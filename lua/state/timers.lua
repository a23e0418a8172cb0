--- What happens by time alone: a retry that comes due, an endpoint that may be used again. The group's record knows
-- when the next is due (`next_timer`), so a call that finds nothing due reads nothing.
local keys = require("state.keys")

local timers = {}

--- Set the timer `member` to `due` ms.
function timers.set(step, member, due)
  server.call("ZADD", keys.of(step.root, "timers"), due, member)
  local group = step.group
  if not group.next_timer or due < group.next_timer then
    group.next_timer, step.timer_moved = due, true
  end
end

--- Forget a timer.
function timers.clear(step, member)
  server.call("ZREM", keys.of(step.root, "timers"), member)
end

local function refresh(step)
  local first = server.call("ZRANGE", keys.of(step.root, "timers"), 0, 0, "WITHSCORES")
  step.group.next_timer = first[2] and tonumber(first[2]) or nil
end

--- Read anew when the next is due: what is told to gateways that sleep. For a repair.
timers.refresh = refresh

--- When the timer `member` is due, ms, or nil.
function timers.due(step, member)
  local due = server.call("ZSCORE", keys.of(step.root, "timers"), member)
  return due and tonumber(due) or nil
end

--- Members from rank `from` on, at most `limit`, by when they are due.
function timers.page(step, from, limit)
  return server.call("ZRANGE", keys.of(step.root, "timers"), from, from + limit - 1)
end

--- Remove and return up to `limit` members that are due.
function timers.take(step, limit)
  local group = step.group
  if not group.next_timer or step.now < group.next_timer then return {} end
  local key = keys.of(step.root, "timers")
  local members = server.call("ZRANGE", key, "-inf", step.now, "BYSCORE", "LIMIT", 0, limit)
  if #members > 0 then server.call("ZREM", key, unpack(members)) end
  refresh(step)
  return members
end

return timers
