--- fabric_repair: put one thing right that an audit found wrong, if it still is what the audit saw.
-- Keys:    group root
-- Args:    kind, name, field, seen, value, actor; the kinds group, pool and endpoint set a counter of that record from
--          what was seen to the value. All others judge anew, and field, seen and value say nothing: placement (place a
--          pool anew), holder (free an endpoint's turn that nobody uses), probe (free an endpoint's probe that no lease
--          is), look (look at an endpoint now that has lost its timer), chores (have an endpoint asked and sampled, or
--          not, as its record says), timer and chore (remove one that is for nothing), retry (give a request that waits
--          for its next attempt its timer), dead (strike one off the list of which nothing is kept), clock (read anew
--          when the next timer and the next chore are due)
-- Answers: REPAIRED now | CHANGED now (it is not what the audit saw any more; nothing was done)
-- Errors:  GROUP_UNKNOWN, POOL_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, pool, endpoint, rotation, heads, kept, waiting, requests, flow, flows, returned, request, timers,
--          chores, dead, events, wake
-- Flags:   allow-oom
-- Cost:    constant
-- Twice:   CHANGED
local audit = require("state.audit")
local breaker = require("lib.breaker")
local chores = require("state.chores")
local dead = require("state.dead")
local endpoints = require("state.endpoints")
local events = require("state.events")
local faults = require("state.faults")
local gate = require("lib.gate")
local group = require("state.group")
local placement = require("state.placement")
local pools = require("state.pools")
local requests = require("state.requests")
local rotation = require("state.rotation")
local state = require("state.step")
local timers = require("state.timers")
local wake = require("state.wake")

local FIELDS = {
  group = { in_flight = true, queued = true, kept = true, delayed = true },
  pool = { depth = true, bytes = true, tombstones = true, returned = true, in_flight = true, delayed = true,
    idle_keys = true, level_0 = true, level_1 = true, level_2 = true, level_3 = true },
  endpoint = { in_flight = true, waiting = true },
}

-- The kinds of repair that set no counter: (step, name) -> word of the answer and what is there now, or nil, an error.
local repairs = {}

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

function repairs.placement(step, name)
  local pool = pools.get(step, name)
  if not pool then return nil, faults.pool_unknown(name, group.details(step.root).pools) end
  rotation.take_out(step, pool)
  placement.place_anew(step, pool)
  return "REPAIRED", pool.record.place
end

-- A wrong counter may have kept a pool parked, or a parked pool from coming back.
local function place_again(step, kind, name)
  if kind == "pool" then repairs.placement(step, name) end
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
function repairs.holder(step, name)
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

-- Free the probe of a breaker that is no running request: the next may come.
function repairs.probe(step, name)
  local endpoint = endpoints.get(step, name)
  local probe = breaker.probing(endpoint.record, step.now) and endpoint.record.probe
  local request = probe and probe.id ~= "" and requests.get(step, probe.id)
  if not probe or probe.id == "" or (request and request.state == "leased" and request.fence == probe.fence) then
    return "CHANGED", probe and probe.id or "none"
  end
  endpoint.record.probe = nil
  chores.set(step, "probe", name, step.now)
  rotation.use_room(step, endpoint)
  return "REPAIRED", "none"
end

-- The endpoint's timer is lost: look now; if there is something to wait for, this sets the timer.
function repairs.look(step, name)
  local endpoint = endpoints.get(step, name)
  local told = endpoint.record.timer_at
  if not told or timers.due(step, "endpoint:" .. name) == told then return "CHANGED", told or "none" end
  endpoint.record.timer_at = nil
  rotation.use_room(step, endpoint)
  return "REPAIRED", endpoint.record.timer_at or "none"
end

function repairs.chores(step, name)
  local endpoint = endpoints.get(step, name)
  if audit.wants_asking(endpoint) then
    chores.set(step, "probe", name, math.max(step.now, endpoint.record.open_until or 0))
  else
    chores.clear(step, "probe", name)
  end
  if gate.configured(endpoint.config) then
    chores.set(step, "sample", name, step.now)
    endpoint.record.polled = true
  else
    chores.clear(step, "sample", name)
  end
  return "REPAIRED", "as its record says"
end

function repairs.timer(step, member)
  local named = audit.named_endpoints(group.details(step.root))
  if not timers.due(step, member) or audit.timer_is_needed(step, named, member) then return "CHANGED", "due" end
  timers.clear(step, member)
  return "REPAIRED", "none"
end

function repairs.chore(step, member)
  local named = audit.named_endpoints(group.details(step.root))
  if audit.chore_is_needed(named, member) or not chores.strike(step, member) then return "CHANGED", "due" end
  return "REPAIRED", "none"
end

function repairs.retry(step, id)
  local request, member = requests.get(step, id), "retry:" .. id
  local due = timers.due(step, member)
  if not request or request.state ~= "delayed" or due then return "CHANGED", due or "none" end
  timers.set(step, member, request.due_ms or step.now)
  return "REPAIRED", request.due_ms or step.now
end

function repairs.dead(step, id)
  if not dead.holds(step.root, id) or dead.find(step, id) then return "CHANGED", "kept" end
  dead.remove(step, id)
  return "REPAIRED", "none"
end

function repairs.clock(step)
  timers.refresh(step)
  chores.refresh(step)
  return "REPAIRED", step.group.next_timer or "none"
end

local function run(keys, args)
  local kind, name, actor = args[1], args[2], args[6]
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local word, now
  if repairs[kind] then
    word, now = repairs[kind](step, name)
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
