--- The waiting requests of one pool, in arrival order. What was given back stands in front, by its group sequence.
local entry = require("lib.entry")
local keys = require("state.keys")

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
  local text = entry.encode(request)
  -- Only the list's own length tells that this is the first: something foreign may stand in it.
  local length = server.call("RPUSH", keys.of(step.root, "requests", pool.name), text)
  if length == 1 and pool.record.returned == 0 then pool.record.head = text end
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
function queue.bury(step, pool, bytes)
  local record = pool.record
  record.depth, record.bytes, record.tombstones = record.depth - 1, record.bytes - bytes, record.tombstones + 1
  step.group.queued = step.group.queued - 1
end

--- The first entry, decoded (once a step), or nil when there is none. Reads the list only when the record does not know
-- it.
function queue.peek(step, pool)
  local record = pool.record
  if pool.head and pool.head.text == record.head then return pool.head end
  if not record.head then
    if queue.length(pool) == 0 then return nil end
    if record.returned > 0 then
      record.head = server.call("ZRANGE", keys.of(step.root, "returned", pool.name), 0, 0)[1]
    end
    -- The list's first may still be the older one: a request is given back behind one that never left.
    local first = server.call("LINDEX", keys.of(step.root, "requests", pool.name), 0)
    if first and (not record.head or entry.decode(first).seq < entry.decode(record.head).seq) then
      record.head = first
    end
    if not record.head then return nil end
  end
  pool.head = entry.decode(record.head)
  return pool.head
end

--- Remove the entry that was just peeked.
function queue.drop_head(step, pool, head)
  local record = pool.record
  record.head = nil
  if record.returned > 0
    and server.call("ZREM", keys.of(step.root, "returned", pool.name), head.text) == 1 then
    record.returned = record.returned - 1
    return
  end
  server.call("LPOP", keys.of(step.root, "requests", pool.name))
end

--- The popped request leaves the queue: it runs or has ended.
function queue.count_out(step, pool, bytes)
  local record = pool.record
  record.depth, record.bytes = record.depth - 1, record.bytes - bytes
  step.group.queued = step.group.queued - 1
end

--- Drop all entries of a pool in which nothing waits: they are tombstones.
function queue.clear(step, pool)
  queue.remove(step, pool.name)
  pool.record.tombstones, pool.record.returned, pool.record.head = 0, 0, nil
end

--- Remove what is left of an empty queue; for a pool that is removed.
function queue.remove(step, name)
  server.call("UNLINK", keys.of(step.root, "requests", name), keys.of(step.root, "returned", name))
end

return queue
