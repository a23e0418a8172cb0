--- Pool records: config and scheduler state of one pool, each one packed value, read and written together.
local keys = require("state.keys")
local packed = require("state.packed")

local FIELDS = require("lib.config").FIELDS.pools

local layout = require("records").pool

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
    -- parked (skip reason), reason, reason_since (while it holds), skipped, skipped_ms (the last one),
    -- paused, draining, keyed, virtual_time, idle_keys (state/flows.lua)
  }
end

local function read(step, name)
  return server.call("HMGET", keys.of(step.root, "pool", name), "config", "record")
end

local function load(step, name, found)
  local record = packed.read_record(found[2], layout.decode)
  if not found[1] or not record then return nil end
  local pool = { name = name, config = packed.read_config(found[1], FIELDS), record = record }
  step.pools[name] = pool
  return pool
end

--- The pool `name` as { name, config, record }, or nil when it is not configured (or damaged: it must not stop a call
-- that serves others, too). Loaded once a step.
function pools.get(step, name)
  return step.pools[name] or load(step, name, read(step, name))
end

-- What a packed record says of a pool in which nothing waits: its first number, `depth`, is 0 and its first text,
-- `place`, "idle".
local NOTHING_WAITS, STANDS_NOWHERE = "\1\0\0\0\0\0\0\0\0", "\4\0idle"

--- The config of the pool `name`, or nil, and whether the pool rests: nothing waits in it, so its record says the same
-- under any config. One that rests is not loaded.
function pools.look(step, name)
  local pool = step.pools[name]
  if pool then return pool.config, false end
  local found = read(step, name)
  local config, record = found[1], found[2]
  if config and record and string.sub(record, 1, 9) == NOTHING_WAITS
    and string.sub(record, layout.texts_at, layout.texts_at + 5) == STANDS_NOWHERE then
    return packed.read_config(config, FIELDS), true
  end
  pool = load(step, name, found)
  return pool and pool.config, false
end

--- The step has changed nothing about this pool: it is not written back. Read anew when it is needed once more.
function pools.release(step, name)
  step.pools[name] = nil
end

--- Write back every pool this step has loaded. Their records are used up.
function pools.save(step)
  for name, pool in pairs(step.pools) do
    local key, record = keys.of(step.root, "pool", name), layout.encode(pool.record)
    if pool.config_text then
      server.call("HSET", key, "config", pool.config_text, "record", record)
    else
      server.call("HSET", key, "record", record)
    end
  end
end

--- Give a pool a config, `text` in JSON, to be written with its record (which a new pool gets here).
function pools.configure(step, pool, config, text)
  step.pools[pool.name] = pool
  pool.config, pool.config_text = config, text
  packed.remember(text, config)
end

--- Give a pool that rests a config. Its record stays as it is stored.
function pools.configure_resting(step, name, config, text)
  server.call("HSET", keys.of(step.root, "pool", name), "config", text)
  packed.remember(text, config)
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
  record.skipped, record.skipped_ms = reason, step.now
end

--- The last reason why the pool was skipped since `request` was submitted, or nil.
function pools.skipped_since(pool, request)
  local record = pool.record
  return record.skipped and record.skipped_ms >= request.submitted_ms and record.skipped or nil
end

--- Count `amount` under `label` of one of the record's counter tables (endings, rejected).
function pools.count(pool, counter, label)
  local table_ = pool.record[counter]
  table_[label] = (table_[label] or 0) + 1
end

return pools
