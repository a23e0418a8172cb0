--- The flows of one pool: a list for each fairness key and priority level, and the tags that decide whose turn it is.
--
-- Start-time fair queueing (Goyal, Vin, Cheng) between the keys of a pool: the key with the lowest tag is next; only
-- a pop moves it (V = its tag, then tag + cost). A key that joins or returns gets max(V, its old tag); an idle key's
-- tag is kept until V has passed it. Requests without a key share one flow. A pool that never saw a key or a level
-- has one list and none of this. Bound: two waiting keys of one pool differ by at most 2M in cost over every window.
--
-- Inside a flow there is a list for each level (0 first to 3). Next is the level head with the least
-- `submitted_ms + level x ageing_ms`, ties to the older, so a request is overtaken only by a better level that was
-- submitted within (difference x ageing_ms) after it. Nothing is moved.
local entry = require("lib.entry")
local keys = require("state.keys")
local schema = require("schema")

local flows = {}

-- The flow of requests without a fairness key; no name can be this.
flows.SHARED = "*"

local LEVELS = 4
local CLEARED_KEYS_MAX = 200
local PAGE_FLOWS_MAX = 250

local function list_key(step, pool, flow, level)
  if flow == flows.SHARED and level == schema.limits.priority_default then
    return keys.of(step.root, "requests", pool.name)
  end
  return keys.of(step.root, "flow", pool.name, flow, level)
end

local function live_key(step, pool)
  return keys.of(step.root, "flows", pool.name)
end

local function idle_key(step, pool)
  return keys.of(step.root, "idle_flows", pool.name)
end

--- Number of entries in all lists, tombstones included.
function flows.count(pool)
  local levels = pool.record.levels
  return levels[1] + levels[2] + levels[3] + levels[4]
end

--- Whether an entry behind the head may be older than the head: keys or several levels are in use.
function flows.mixed(pool)
  local levels = pool.record.levels
  return pool.record.keyed or flows.count(pool) > math.max(levels[1], levels[2], levels[3], levels[4])
end

-- The pool's first key: from now on the flows have tags. What waits already is the shared flow's.
local function begin_keys(step, pool)
  local record = pool.record
  record.keyed, record.virtual_time, record.idle_keys = true, record.virtual_time or 0, 0
  if flows.count(pool) > 0 then
    server.call("ZADD", live_key(step, pool), record.virtual_time, flows.SHARED)
  end
end

-- The flow is waited in: give it a tag if it has none.
local function join(step, pool, flow)
  local record = pool.record
  if server.call("ZSCORE", live_key(step, pool), flow) then return end
  local tag = record.virtual_time
  local old = record.idle_keys > 0 and server.call("ZSCORE", idle_key(step, pool), flow)
  if old then
    tag = math.max(tag, tonumber(old))
    record.idle_keys = record.idle_keys - server.call("ZREM", idle_key(step, pool), flow)
  end
  server.call("ZADD", live_key(step, pool), tag, flow)
end

--- The flow a request with this fairness key joins: the key's own, or the shared one when the pool has as many keys
-- as it may.
function flows.of(step, pool, fairness_key)
  if fairness_key == "" then return flows.SHARED end
  local record = pool.record
  if not record.keyed then return fairness_key end
  local live = server.call("ZCARD", live_key(step, pool))
  if live + record.idle_keys < schema.limits.fairness_keys_max
    or server.call("ZSCORE", live_key(step, pool), fairness_key)
    or server.call("ZSCORE", idle_key(step, pool), fairness_key) then
    return fairness_key
  end
  return flows.SHARED
end

--- Append an entry to its flow's list for its level.
function flows.append(step, pool, request, text)
  local record = pool.record
  local level = request.level
  if request.flow ~= flows.SHARED and not record.keyed then begin_keys(step, pool) end
  local length = server.call("RPUSH", list_key(step, pool, request.flow, level), text)
  record.levels[level + 1] = record.levels[level + 1] + 1
  if record.keyed then
    join(step, pool, request.flow)
    record.head = nil
  elseif length == 1 and record.returned == 0 and flows.count(pool) == 1 then
    -- The list's own length counts, too: something foreign may stand in it.
    record.head, record.head_flow, record.head_level = text, flows.SHARED, level
  elseif flows.count(pool) > record.levels[level + 1] then
    record.head = nil -- other levels are in use: this one may go first
  end
end

-- The first entry of a flow over its levels, or nil when the flow is empty.
local function first_of(step, pool, flow)
  local best, best_rank
  local levels = pool.record.levels
  for level = 0, LEVELS - 1 do
    if levels[level + 1] > 0 then
      local text = server.call("LINDEX", list_key(step, pool, flow, level), 0)
      if text then
        local head = entry.decode(text)
        local rank = head.submitted_ms + level * pool.config.priority_ageing_ms
        if not best or rank < best_rank or (rank == best_rank and head.seq < best.seq) then
          head.flow, head.level, best, best_rank = flow, level, head, rank
        end
      end
    end
  end
  return best
end

--- The pool's first entry among its flows, decoded, with `flow` and `level`; nil when nothing waits in them.
function flows.first(step, pool)
  if not pool.record.keyed then return first_of(step, pool, flows.SHARED) end
  local flow = server.call("ZRANGE", live_key(step, pool), 0, 0)[1]
  return flow and first_of(step, pool, flow)
end

local function is_empty(step, pool, flow)
  local lists = {}
  for level = 0, LEVELS - 1 do
    if pool.record.levels[level + 1] > 0 then lists[#lists + 1] = list_key(step, pool, flow, level) end
  end
  return #lists == 0 or server.call("EXISTS", unpack(lists)) == 0
end

-- Keep the tag of a flow in which nothing waits, as long as V has not passed it.
local function rest(step, pool, flow, tag)
  local record = pool.record
  if tag > record.virtual_time then
    record.idle_keys = record.idle_keys + server.call("ZADD", idle_key(step, pool), tag, flow)
  end
end

local function forget_passed(step, pool)
  local record = pool.record
  if record.idle_keys == 0 then return end
  record.idle_keys = record.idle_keys
    - server.call("ZREMRANGEBYSCORE", idle_key(step, pool), "-inf", record.virtual_time)
end

-- The list's first was not the head that the record knows: somebody else wrote into the list. The head must go, or it
-- would stand there uncounted and the list's last for ever behind it. What could be an entry keeps its place.
local function remove_behind(list, first, head)
  if entry.decode(first).seq > 0 then server.call("LPUSH", list, first) end
  server.call("LREM", list, 1, head.text)
end

--- Remove the entry that was peeked. `units`: what its launch is charged; nil for a dead head, which costs nothing.
function flows.pop(step, pool, head, units)
  local record = pool.record
  local list = list_key(step, pool, head.flow, head.level)
  local first = server.call("LPOP", list)
  if first and first ~= head.text then remove_behind(list, first, head) end
  if head.seq > 0 then -- a foreign entry was never counted
    record.levels[head.level + 1] = record.levels[head.level + 1] - 1
  end
  if not record.keyed then return end
  local tag = tonumber(server.call("ZSCORE", live_key(step, pool), head.flow) or record.virtual_time)
  if units then
    record.virtual_time = tag
    tag = tag + units
  end
  if is_empty(step, pool, head.flow) then
    server.call("ZREM", live_key(step, pool), head.flow)
    rest(step, pool, head.flow, tag)
  elseif units then
    server.call("ZADD", live_key(step, pool), tag, head.flow)
  end
  if units then forget_passed(step, pool) end
end

--- Settle the cost of a request that has ended: its key pays or gets back the difference to what it was charged.
function flows.settle(step, pool, flow, difference)
  local record = pool.record
  if not record.keyed then return end
  local live = server.call("ZSCORE", live_key(step, pool), flow)
  if live then
    server.call("ZADD", live_key(step, pool), math.max(record.virtual_time, tonumber(live) + difference), flow)
    record.head = nil
    return
  end
  local idle = server.call("ZSCORE", idle_key(step, pool), flow)
  if idle then record.idle_keys = record.idle_keys - server.call("ZREM", idle_key(step, pool), flow) end
  rest(step, pool, flow, math.max(record.virtual_time, tonumber(idle or record.virtual_time)) + difference)
end

--- How many tags of keys are kept in which nothing waits.
function flows.idle_count(step, pool)
  return server.call("ZCARD", idle_key(step, pool))
end

--- Append entries to `found`, as { text, level }, up to `limit` of them: from `from` = { rank, level, offset } on, flow
-- by flow in the order of their turns. Looks at a bounded number of flows. Returns where to go on, nil at the end.
-- `from.counted`: levels that the record counts nothing in are not looked at.
function flows.page(step, pool, from, found, limit)
  local names, levels = { flows.SHARED }, pool.record.levels
  if pool.record.keyed then
    names = server.call("ZRANGE", live_key(step, pool), from.rank, from.rank + PAGE_FLOWS_MAX - 1)
  end
  local first_level, offset = from.level, from.offset
  for at, flow in ipairs(names) do
    for level = first_level, LEVELS - 1 do
      local room = limit - #found
      local texts = room > 0 and (levels[level + 1] > 0 or not from.counted)
        and server.call("LRANGE", list_key(step, pool, flow, level), offset, offset + room - 1) or {}
      for _, text in ipairs(texts) do found[#found + 1] = { text = text, level = level } end
      if #texts == room then return { rank = from.rank + at - 1, level = level, offset = offset + room } end
      offset = 0
    end
    first_level = 0
  end
  if #names < PAGE_FLOWS_MAX then return nil end
  return { rank = from.rank + PAGE_FLOWS_MAX, level = 0, offset = 0 }
end

--- Drop all entries of a pool in which nothing waits: they are tombstones. False when it has so many keys that this
-- would hold up the server; then they stay until they are met.
function flows.clear(step, pool)
  local record = pool.record
  local names = { flows.SHARED, 0 }
  if record.keyed then
    if server.call("ZCARD", live_key(step, pool)) > CLEARED_KEYS_MAX then return false end
    names = server.call("ZRANGE", live_key(step, pool), 0, -1, "WITHSCORES")
  end
  for at = 1, #names, 2 do
    for level = 0, LEVELS - 1 do
      if record.levels[level + 1] > 0 then server.call("UNLINK", list_key(step, pool, names[at], level)) end
    end
    if record.keyed then rest(step, pool, names[at], tonumber(names[at + 1])) end
  end
  if record.keyed then server.call("DEL", live_key(step, pool)) end
  record.levels = { 0, 0, 0, 0 }
  return true
end

--- The pool's record was lost and begun anew: find out whether it has keys, and where their turns stand.
function flows.restore(step, pool)
  local record = pool.record
  local lowest = server.call("ZRANGE", live_key(step, pool), 0, 0, "WITHSCORES")
  local idle = flows.idle_count(step, pool)
  if not lowest[1] and idle == 0 then return end
  record.keyed, record.virtual_time, record.idle_keys = true, tonumber(lowest[2] or 0), idle
end

--- Count the entries of all lists anew. Not when the pool has so many keys that this would hold up the server.
function flows.recount(step, pool)
  local record, levels = pool.record, { 0, 0, 0, 0 }
  local names = { flows.SHARED }
  if record.keyed then
    names = server.call("ZRANGE", live_key(step, pool), 0, CLEARED_KEYS_MAX)
    if #names > CLEARED_KEYS_MAX then return end
  end
  for _, flow in ipairs(names) do
    for level = 0, LEVELS - 1 do
      levels[level + 1] = levels[level + 1] + server.call("LLEN", list_key(step, pool, flow, level))
    end
  end
  record.levels = levels
end

--- Nothing waits in the pool any more: without a key whose tag still counts, it is as if it never saw one.
function flows.rest_pool(pool)
  local record = pool.record
  if record.keyed and record.idle_keys == 0 and flows.count(pool) == 0 then
    record.keyed, record.virtual_time, record.idle_keys = nil, nil, nil
  end
end

--- Remove what is left of an empty pool's flows.
function flows.remove(step, pool)
  server.call("DEL", keys.of(step.root, "requests", pool.name), live_key(step, pool), idle_key(step, pool))
end

return flows
