--- Pool records: config and scheduler state of one pool, each one packed value, read and written together.
local keys = require("state.keys")
local packed = require("state.packed")

local pools = {}

--- A record as it stands before the first request.
function pools.new_record()
  return {
    depth = 0, bytes = 0,       -- live waiting requests and the bytes of their bodies
    tombstones = 0,             -- entries of requests that ended while they waited
    returned = 0,               -- entries in the returned zset
    in_flight = 0, delayed = 0,
    deficit = 0, mark = 0, open = false, launches = 0, -- lib/drr.lua
    place = "idle",             -- idle, line (can be visited) or parked
    kept = false,               -- stands in the kept list
    levels = { 0, 0, 0, 0 },    -- entries in the lists of each priority level
    submitted = 0, launched = 0, cost_served = 0,
    endings = {}, rejected = {}, skips = {},
    -- absent when unset: turn, head (first entry's text; head_flow and head_level when it stands in a flow's list),
    -- parked (skip reason), reason, reason_since, paused, draining, keyed, virtual_time, idle_keys (state/flows.lua)
  }
end

--- The pool `name` as { name, config, record }, or nil when it is not configured (or damaged: it must not stop a call
-- that serves others, too). Loaded once a step.
function pools.get(step, name)
  local pool = step.pools[name]
  if pool then return pool end
  local found = server.call("HMGET", keys.of(step.root, "pool", name), "config", "record")
  local record = packed.read_record(found[2])
  if not found[1] or not record then return nil end
  pool = { name = name, config = packed.read_config(found[1]), record = record }
  step.pools[name] = pool
  return pool
end

--- Write back every pool this step has loaded.
function pools.save(step)
  for name, pool in pairs(step.pools) do
    server.call("HSET", keys.of(step.root, "pool", name), "record", cmsgpack.pack(pool.record))
  end
end

--- Store a pool's config (and its record, which a new pool gets here).
function pools.configure(step, pool)
  step.pools[pool.name] = pool
  server.call("HSET", keys.of(step.root, "pool", pool.name), "config", cmsgpack.pack(pool.config))
end

function pools.remove(step, name)
  step.pools[name] = nil
  server.call("DEL", keys.of(step.root, "pool", name))
end

--- Count a skip and remember why the pool waits, and since when.
function pools.skip(step, pool, reason)
  local record = pool.record
  record.skips[reason] = (record.skips[reason] or 0) + 1
  if record.reason ~= reason then record.reason, record.reason_since = reason, step.now end
end

--- Count `amount` under `label` of one of the record's counter tables (endings, rejected).
function pools.count(pool, counter, label)
  local table_ = pool.record[counter]
  table_[label] = (table_[label] or 0) + 1
end

return pools
