--- Requests that ended dead: kept whole, to be looked at, retried or dropped. The list is bounded in number and time. A
-- member whose request is not there any more (or is another one by now) is as good as none.
local keys = require("state.keys")
local requests = require("state.requests")

local dead = {}

-- How many a death makes room for at most: a list whose bounds were lowered shrinks in steps.
local TRIMMED_MAX = 100

-- The oldest that are too many or too old go, with all that is kept of them.
local function trim(step)
  local key = keys.of(step.root, "dead")
  local late = server.call("ZCOUNT", key, "-inf", step.now - step.config.dead_ttl_ms)
  local over = server.call("ZCARD", key) - step.config.dead_kept
  local count = math.min(TRIMMED_MAX, math.max(late, over))
  if count <= 0 then return end
  local ids = server.call("ZRANGE", key, 0, count - 1)
  for _, id in ipairs(ids) do
    local request = dead.find(step, id)
    if request then requests.discard(step, request) end
  end
  server.call("ZREM", key, unpack(ids))
end

--- Keep a request that has just ended dead, envelope and body included, as long as the group's config says.
function dead.add(step, request)
  local ttl_ms = step.config.dead_ttl_ms
  if step.config.dead_kept == 0 then
    requests.forget_content(step, request)
    return
  end
  requests.keep(step, request, ttl_ms)
  local key = keys.of(step.root, "dead")
  server.call("ZADD", key, step.now, request.id)
  server.call("PEXPIRE", key, ttl_ms) -- the last that died is the last to go
  trim(step)
end

--- Strike a request off the list.
function dead.remove(step, id)
  server.call("ZREM", keys.of(step.root, "dead"), id)
end

--- When the request died, ms, if it stands in the list; nil otherwise.
function dead.holds(root, id)
  return tonumber(server.call("ZSCORE", keys.of(root, "dead"), id) or nil)
end

local function if_dead(request)
  return request and request.state == "ended" and request.ending == "dead" and request or nil
end

--- The dead request `id`, or nil. Without its body.
function dead.find(step, id)
  return if_dead(requests.get(step, id))
end

--- The dead request `id` with its body ("" when that has its own key), or nil.
function dead.find_whole(step, id)
  return if_dead(requests.get_whole(step, id))
end

--- How many are kept.
function dead.count(step)
  return server.call("ZCOUNT", keys.of(step.root, "dead"), "(" .. step.now - step.config.dead_ttl_ms, "+inf")
end

-- The position behind the one a cursor names. Whoever stood there may be gone: then behind all that died later.
local function position(key, cursor)
  local at, id = string.match(cursor, "^(%d+):(.*)$")
  if not at then return 0 end
  local rank = server.call("ZREVRANK", key, id)
  return rank and rank + 1 or server.call("ZCOUNT", key, "(" .. at, "+inf")
end

--- A page of the list, the last that died in front, as { id, died_ms }; and where to go on, "" at the end. Deaths and
-- removals between two pages hide nobody.
function dead.page(root, cursor, limit)
  local key = keys.of(root, "dead")
  local from = position(key, cursor)
  local found = server.call("ZRANGE", key, from, from + limit - 1, "REV", "WITHSCORES")
  local rows = {}
  for at = 1, #found, 2 do rows[#rows + 1] = { id = found[at], died_ms = tonumber(found[at + 1]) } end
  local last = rows[limit]
  return rows, last and string.format("%.0f:%s", last.died_ms, last.id) or ""
end

return dead
