--- Bringing a changed config into force: every pool keeps its credit, its turn and its running requests, and is placed
-- anew under the new rules. Whatever becomes launchable by it rings the wake list.
local clock = require("state.clock")
local drr = require("lib.drr")
local endpoints = require("state.endpoints")
local group = require("state.group")
local pools = require("state.pools")
local queue = require("state.queue")
local rotation = require("state.rotation")
local slots = require("state.slots")
local wake = require("state.wake")

local placement = {}

--- A step for a group that was never configured.
function placement.first_step(root)
  return { root = root, now = clock.now_ms(), config = {}, group = group.new_record(), pools = {}, endpoints = {},
    ended = 0 }
end

-- Endpoints that are new or changed (`changed`, a set of names) get their config, those left out lose it and join the
-- set. Returns a list of those left out.
local function apply_endpoints(step, before, after, changed)
  local named, gone = {}, {}
  for at, config in ipairs(after.endpoints) do
    local name = config.endpoint_id
    named[name] = true
    if changed[name] then
      endpoints.configure(step, endpoints.get(step, name), config, after.texts.endpoints[at])
    end
  end
  for _, name in ipairs(before.names.endpoints) do
    if not named[name] then
      local endpoint = endpoints.get(step, name)
      endpoints.configure(step, endpoint, {}, "{}")
      changed[name] = true
      gone[#gone + 1] = endpoint
    end
  end
  return gone
end

-- A pool that is new, or was named and is lost; those are listed in `restored`.
local function make(step, name, before, restored)
  local pool = { name = name, config = {}, record = pools.new_record() }
  for _, named in ipairs(before.names.pools) do
    if named == name then
      queue.restore(step, pool)
      restored[#restored + 1] = pool
    end
  end
  return pool
end

-- Pools whose rules change get them and are lifted. Returns a list of these, and one of those that were made again.
local function apply_pools(step, before, after, changed)
  local moved, restored = {}, {}
  local everything = before.config.policy ~= step.config.policy or before.config.cost_max ~= step.config.cost_max
  for at, config in ipairs(after.pools) do
    local name = config.pool_id
    if before.resting[name] then
      if changed.pools[name] then pools.configure_resting(step, name, config, after.texts.pools[at]) end
    else
      local pool = pools.get(step, name) or make(step, name, before, restored)
      local old_endpoint = pool.config.endpoint or config.endpoint
      if everything or changed.pools[name] or changed.endpoints[old_endpoint] or changed.endpoints[config.endpoint] then
        rotation.lift(step, pool, old_endpoint, before.config.policy)
        if changed.pools[name] then pools.configure(step, pool, config, after.texts.pools[at]) end
        moved[#moved + 1] = pool
      else
        pools.release(step, name)
      end
    end
  end
  return moved, restored
end

-- Empty pools that are left out go, with everything of theirs. (That they are empty was checked before.)
local function remove_pools(step, names, old_policy)
  for _, name in ipairs(names) do
    local pool = pools.get(step, name)
    rotation.lift(step, pool, pool.config.endpoint, old_policy)
    rotation.strike(step, pool)
    pools.remove(step, name)
    queue.remove(step, pool)
  end
end

--- Forget every placement of the pool and place it anew, at the turn it has. `line`: as of rotation.come_back.
function placement.place_anew(step, pool, line)
  local record = pool.record
  record.place, record.parked, record.head = "idle", nil, nil
  record.reason, record.reason_since = nil, nil
  if not record.open then record.deficit = math.min(record.deficit, step.config.cost_max) end
  if record.depth == 0 then
    record.turn = nil
    drr.drop_credit(record)
  elseif record.turn then
    rotation.come_back(step, pool, line)
  else
    rotation.enter(step, pool)
  end
end

--- The config that is in force, as `lib/changes.lua` compares it. Also: `config` of the group, `names` of what the
-- document in force has, and the set of pools that are `resting` (state/pools.lua).
function placement.in_force(step, details)
  local found = { group = details.generation > 0 and step.config or nil, config = step.config, pools = {},
    endpoints = {}, names = { pools = details.pools, endpoints = details.endpoints }, resting = {} }
  for _, name in ipairs(details.pools) do
    local config, rests = pools.look(step, name)
    found.pools[#found.pools + 1] = config
    found.resting[name] = rests or nil
  end
  for _, name in ipairs(details.endpoints) do
    local config = endpoints.get(step, name).config
    if config.endpoint_id then found.endpoints[#found.endpoints + 1] = config end
  end
  return found
end

--- Bring a config into force in a step whose `config` is the new one already. `before` is what was in force, `after`
-- has `pools`, `endpoints` and the `texts` of both (lib/document.lua), `changed` is what lib/changes.lua found.
function placement.apply(step, before, after, changed)
  local gone = apply_endpoints(step, before, after, changed.endpoints)
  local moved, restored = apply_pools(step, before, after, changed)
  remove_pools(step, changed.gone, before.config.policy)
  for _, pool in ipairs(restored) do rotation.take_out(step, pool) end
  if restored[1] then slots.recount(step) end
  local line = {}
  for _, pool in ipairs(moved) do placement.place_anew(step, pool, line) end
  rotation.line_up(step, line)
  -- Whoever had the turn on an endpoint may have been lifted: the next may come.
  for _, config in ipairs(after.endpoints) do rotation.use_room(step, endpoints.get(step, config.endpoint_id)) end
  for _, endpoint in ipairs(gone) do
    if endpoint.record.in_flight == 0 then endpoints.remove(step, endpoint.name) end
  end
  -- A raised group cap moves no pool and still makes work launchable; whoever wakes and is satisfied rings the next.
  if rotation.anyone(step) then wake.ring(step) end
end

return placement
