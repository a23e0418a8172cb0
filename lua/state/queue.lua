--- The waiting requests of one pool, in arrival order. What was given back stands in front, by its group sequence.
local entry = require("lib.entry")
local flows = require("state.flows")
local keys = require("state.keys")
local requests = require("state.requests")

local queue = {}

--- Number of entries, tombstones included.
function queue.length(pool)
  return pool.record.depth + pool.record.tombstones
end

local function count_in(step, pool, bytes)
  local record = pool.record
  record.depth, record.bytes = record.depth + 1, record.bytes + bytes
  step.group.queued = step.group.queued + 1
end

--- Append a request that has just arrived.
function queue.append(step, pool, request)
  flows.append(step, pool, request, entry.encode(request))
  count_in(step, pool, request.bytes)
end

--- Put a request back where it stood in arrival order, before everything that came after it.
function queue.give_back(step, pool, request)
  server.call("ZADD", keys.of(step.root, "returned", pool.name), request.seq, entry.encode(request))
  pool.record.returned = pool.record.returned + 1
  pool.record.head = nil
  count_in(step, pool, request.bytes)
end

--- A request that waits has ended: it counts no more, its entry becomes a tombstone (removing it would be linear).
-- `pool` nil: its record was lost, so only the group counted it.
function queue.bury(step, pool, bytes)
  step.group.queued = step.group.queued - 1
  if not pool then return end
  local record = pool.record
  record.depth, record.bytes, record.tombstones = record.depth - 1, record.bytes - bytes, record.tombstones + 1
end

--- Whether an entry behind the first may be older than it.
function queue.mixed(pool)
  return flows.mixed(pool)
end

local function first_returned(step, pool)
  if pool.record.returned == 0 then return nil end
  local text = server.call("ZRANGE", keys.of(step.root, "returned", pool.name), 0, 0)[1]
  return text and entry.decode(text)
end

-- Where the first entry is to be found, decoded, or nil.
local function find_first(step, pool)
  local head = first_returned(step, pool)
  -- Without keys the list's first may be the older one: a request was given back behind one that never left. With keys
  -- what was given back goes first: its key has paid for it.
  if not head or not pool.record.keyed then
    local waiting = flows.first(step, pool)
    if waiting and (not head or waiting.seq < head.seq) then head = waiting end
  end
  return head
end

-- Something waits and no entry is where the counts say: others wrote into the lists, so the counts may be wrong.
local function recount(step, pool)
  pool.record.returned = server.call("ZCARD", keys.of(step.root, "returned", pool.name))
  flows.recount(step, pool)
end

--- The first entry, decoded (once a step), or nil when there is none. Lists are read only when the record does not
-- know.
function queue.peek(step, pool)
  local record = pool.record
  if pool.head and pool.head.text == record.head then return pool.head end
  if record.head then
    pool.head = entry.decode(record.head)
    pool.head.flow, pool.head.level = record.head_flow, record.head_level
    return pool.head
  end
  if queue.length(pool) == 0 then return nil end
  local head = find_first(step, pool)
  if not head and record.depth > 0 then
    recount(step, pool)
    head = find_first(step, pool)
  end
  if not head then return nil end
  record.head, record.head_flow, record.head_level = head.text, head.flow, head.level
  pool.head = head
  return head
end

--- Remove the entry that was just peeked. `units`: what its launch is charged, nil when it is not launched.
function queue.drop_head(step, pool, head, units)
  local record = pool.record
  record.head = nil
  if head.flow then
    flows.pop(step, pool, head, units)
  else
    local removed = server.call("ZREM", keys.of(step.root, "returned", pool.name), head.text)
    if head.seq > 0 then record.returned = record.returned - removed end -- a foreign entry was never counted
  end
end

--- The popped request leaves the queue: it runs or has ended.
function queue.count_out(step, pool, bytes)
  local record = pool.record
  record.depth, record.bytes = record.depth - 1, record.bytes - bytes
  step.group.queued = step.group.queued - 1
end

--- Entries of the pool from `cursor` on ("" = the start), at most `limit`, as { text, level } (no level = given back):
-- what was given back, then flow by flow in the order of their turns. Also where to go on, "" at the end. A page looks
-- at a bounded number of flows, so it may be short without being the last.
-- `counted`: the record's counts are believed, so what others wrote into a list that should be empty is not found.
function queue.page(step, pool, cursor, limit, counted)
  local found = {}
  local rank, level, offset = string.match(cursor, "^(%d+)%.(%d+)%.(%d+)$")
  local from = { rank = tonumber(rank or 0), level = tonumber(level or 0), offset = tonumber(offset or 0),
    counted = counted }
  if not rank then
    local skip = tonumber(cursor) or 0
    local texts = server.call("ZRANGE", keys.of(step.root, "returned", pool.name), skip, skip + limit - 1)
    for at, text in ipairs(texts) do found[at] = { text = text } end
    if #texts == limit then return found, tostring(skip + limit) end
  end
  local after = flows.page(step, pool, from, found, limit)
  return found, after and string.format("%.0f.%.0f.%.0f", after.rank, after.level, after.offset) or ""
end

-- Entries that are looked at when a lost record is made again: as many as a pool holds by default.
local RESTORED_MAX = 10000
local RESTORED_PAGE = 500

local function restore_entry(step, pool, item)
  local record, head = pool.record, entry.decode(item.text)
  if head.seq == 0 then return end -- a foreign entry is never counted
  if item.level then
    record.levels[item.level + 1] = record.levels[item.level + 1] + 1
  else
    record.returned = record.returned + 1
  end
  local request = requests.get(step, head.id)
  if request and request.state == "queued" and request.seq == head.seq then
    record.depth, record.bytes = record.depth + 1, record.bytes + request.bytes
  else
    record.tombstones = record.tombstones + 1
  end
end

--- The pool's record was lost and begun anew: count what stands in its lists. (The group never forgot what waits.)
function queue.restore(step, pool)
  flows.restore(step, pool)
  local cursor, seen = "", 0
  repeat
    local found
    found, cursor = queue.page(step, pool, cursor, RESTORED_PAGE)
    for _, item in ipairs(found) do restore_entry(step, pool, item) end
    seen = seen + #found
  until cursor == "" or seen >= RESTORED_MAX
end

--- Nothing waits in the pool any more: what is left in its lists are tombstones.
function queue.rest(step, pool)
  local record = pool.record
  if record.tombstones > 0 and flows.clear(step, pool) then
    if record.returned > 0 then server.call("UNLINK", keys.of(step.root, "returned", pool.name)) end
    record.tombstones, record.returned, record.head = 0, 0, nil
  end
  flows.rest_pool(pool)
end

--- Settle the cost of a request that has ended: its key pays or gets back `difference`.
function queue.settle(step, pool, flow, difference)
  flows.settle(step, pool, flow, difference)
end

--- Remove what is left of an empty queue; for a pool that is removed.
function queue.remove(step, pool)
  flows.remove(step, pool)
  server.call("UNLINK", keys.of(step.root, "returned", pool.name))
end

return queue
