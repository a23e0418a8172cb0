--- fabric_repair: set one counter that an audit found wrong, if it still is what the audit saw; or place a pool anew.
-- Keys:    group root
-- Args:    kind (group pool endpoint: a counter; placement: of the pool; holder: an endpoint's turn that nobody uses),
--          name, field, seen, value, actor
-- Answers: REPAIRED now | CHANGED now (it is not what the audit saw any more; nothing was done)
-- Errors:  GROUP_UNKNOWN, POOL_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, pool, endpoint, rotation, heads, kept, waiting, requests, flow, flows, returned, events, wake
-- Flags:   allow-oom
-- Cost:    constant
-- Twice:   CHANGED
local endpoints = require("state.endpoints")
local events = require("state.events")
local faults = require("state.faults")
local group = require("state.group")
local pools = require("state.pools")
local rotation = require("state.rotation")
local state = require("state.step")
local wake = require("state.wake")

local FIELDS = {
  group = { in_flight = true, queued = true, kept = true },
  pool = { depth = true, bytes = true, tombstones = true, returned = true, in_flight = true, idle_keys = true,
    level_0 = true, level_1 = true, level_2 = true, level_3 = true },
  endpoint = { in_flight = true, waiting = true },
}

local function record_of(step, kind, name)
  if kind == "group" then return step.group end
  if kind == "endpoint" then return endpoints.get(step, name).record end
  local pool = pools.get(step, name)
  return pool and pool.record
end

-- The table and the index under which a record keeps `field`.
local function cell(record, field)
  local level = string.match(field, "^level_(%d)$")
  if level then return record.levels, tonumber(level) + 1 end
  return record, field
end

local function place(step, name)
  local pool = pools.get(step, name)
  if not pool then return nil, faults.pool_unknown(name, group.details(step.root).pools) end
  rotation.take_out(step, pool)
  rotation.place_anew(step, pool)
  return "REPAIRED", pool.record.place
end

-- A wrong counter may have kept a pool parked, or a parked pool from coming back.
local function place_again(step, kind, name)
  if kind == "pool" then place(step, name) end
  if kind == "endpoint" then rotation.use_room(step, endpoints.get(step, name)) end
end

-- Set the counter. Returns the word of the answer and the value, or nil and an error reply.
local function set(step, kind, name, change)
  if not (FIELDS[kind] and FIELDS[kind][change.field]) then
    return nil, faults.bad_argument("field", tostring(kind) .. "." .. tostring(change.field), "what an audit lists")
  end
  if not change.seen or not change.value then
    return nil, faults.bad_argument("value", change.value, "a number, and the one that was seen")
  end
  local record = record_of(step, kind, name)
  if not record then return nil, faults.pool_unknown(name, group.details(step.root).pools) end
  local holder, index = cell(record, change.field)
  local now = holder[index] or 0
  if now ~= change.seen then return "CHANGED", now end
  holder[index] = change.value
  place_again(step, kind, name)
  return "REPAIRED", change.value
end

-- Take the turn on an endpoint from a pool that stands in no line.
local function free_turn(step, name)
  local endpoint = endpoints.get(step, name)
  local holder = endpoint.record.holder
  local pool = holder and pools.get(step, holder)
  if not holder or (pool and pool.record.place == "line" and pool.config.endpoint == name) then
    return "CHANGED", holder or "none"
  end
  endpoint.record.holder = nil
  rotation.use_room(step, endpoint)
  return "REPAIRED", endpoint.record.holder or "none"
end

local function run(keys, args)
  local kind, name, actor = args[1], args[2], args[6]
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local word, now
  if kind == "placement" then
    word, now = place(step, name)
  elseif kind == "holder" then
    word, now = free_turn(step, name)
  else
    word, now = set(step, kind, name, { field = args[3], seen = tonumber(args[4]), value = tonumber(args[5]) })
  end
  if not word then return now end
  if word == "REPAIRED" then
    events.append(keys[1], step.now, "repair", { "what", kind, "name", name, "field", args[3], "seen", args[4],
      "value", tostring(now), "actor", actor })
    wake.ring(step)
    state.save(step)
  end
  return { word, now }
end

return { run = run }
