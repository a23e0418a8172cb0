--- Work that a gateway does for the group beside its runs: asking an endpoint whether it is back when nothing waits for
-- it, and polling an engine's metrics. A chore that is handed out is due again when its time is over, so a gateway that
-- dies with it delays it only. The group's record knows when the next is due (`next_chore`).
local keys = require("state.keys")

local chores = {}

local function refresh(step)
  local first = server.call("ZRANGE", keys.of(step.root, "chores"), 0, 0, "WITHSCORES")
  step.group.next_chore = first[2] and tonumber(first[2]) or nil
end

--- Read anew when the next is due. For a repair.
chores.refresh = refresh

--- Remove `member`, whatever it is. For a repair.
function chores.strike(step, member)
  local removed = server.call("ZREM", keys.of(step.root, "chores"), member)
  refresh(step)
  return removed == 1
end

--- Have `kind` ("probe" or "sample") done for the endpoint `name` at `due` ms.
function chores.set(step, kind, name, due)
  server.call("ZADD", keys.of(step.root, "chores"), due, kind .. ":" .. name)
  refresh(step)
end

--- Have it done no more.
function chores.clear(step, kind, name)
  if server.call("ZREM", keys.of(step.root, "chores"), kind .. ":" .. name) == 1 then refresh(step) end
end

--- Up to `limit` chores that are due, as { kind, name, member }. They stay until they are set anew or cleared.
function chores.due(step, limit)
  local found = {}
  local members = server.call("ZRANGE", keys.of(step.root, "chores"), "-inf", step.now, "BYSCORE", "LIMIT", 0, limit)
  for at, member in ipairs(members) do
    local kind, name = string.match(member, "^(%a+):(.*)$")
    found[at] = { kind = kind or "", name = name or member, member = member }
  end
  return found
end

--- When `kind` is to be done for the endpoint `name`, ms; nil = it is not.
function chores.due_at(step, kind, name)
  local due = server.call("ZSCORE", keys.of(step.root, "chores"), kind .. ":" .. name)
  return due and tonumber(due) or nil
end

--- Milliseconds until the next chore is due, -1 = there is none.
function chores.due_in(step)
  local due = step.group.next_chore
  return due and math.max(0, due - step.now) or -1
end

return chores
