--- Bringing a changed config into force: every pool keeps its credit, its turn and its running requests, and is placed
-- anew under the new rules. Whatever becomes launchable by it rings the wake list.
local clock = require("state.clock")
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

--- The config that is in force, as `lib/changes.lua` compares it.
function placement.in_force(step, details)
  local found = { group = details.generation > 0 and step.config or nil, pools = {}, endpoints = {} }
  for _, name in ipairs(details.pools) do
    local pool = pools.get(step, name)
    if pool then found.pools[#found.pools + 1] = pool.config end
  end
  for _, name in ipairs(details.endpoints) do
    local config = endpoints.get(step, name).config
    if config.endpoint_id then found.endpoints[#found.endpoints + 1] = config end
  end
  return found
end

-- Endpoints that are new or changed (`changed`, a set of names) get their config, those left out lose it and join the
-- set. Returns a list of those left out.
local function apply_endpoints(step, details, configs, changed)
  local named, gone = {}, {}
  for _, config in ipairs(configs) do
    local endpoint = endpoints.get(step, config.endpoint_id)
    named[endpoint.name] = true
    if changed[endpoint.name] then
      endpoint.config = config
      endpoints.configure(step, endpoint)
    end
  end
  for _, name in ipairs(details.endpoints) do
    if not named[name] then
      local endpoint = endpoints.get(step, name)
      endpoint.config, changed[name] = {}, true
      endpoints.configure(step, endpoint)
      gone[#gone + 1] = endpoint
    end
  end
  return gone
end

-- Empty pools that are left out go, with everything of theirs. (That they are empty was checked before.)
local function remove_pools(step, details, named, old_policy)
  for _, name in ipairs(details.pools) do
    local pool = not named[name] and pools.get(step, name)
    if pool then
      rotation.lift(step, pool, pool.config.endpoint, old_policy)
      rotation.strike(step, pool)
      pools.remove(step, name)
      queue.remove(step, pool)
    end
  end
end

--- Bring a normalised `document` into force in a step whose config is the new one already. `changed` has the sets of
-- `pools` and `endpoints` that are new or differ (lib/changes.lua).
function placement.apply(step, old_config, details, document, changed)
  local everything = old_config.policy ~= step.config.policy or old_config.cost_max ~= step.config.cost_max
  local gone = apply_endpoints(step, details, document.endpoints, changed.endpoints)
  local named, moved, restored = {}, {}, {}
  local was_named = {}
  for _, name in ipairs(details.pools) do was_named[name] = true end
  for _, config in ipairs(document.pools) do
    local name = config.pool_id
    local pool = pools.get(step, name)
    if not pool then
      pool = { name = name, config = {}, record = pools.new_record() }
      if was_named[name] then
        queue.restore(step, pool)
        restored[#restored + 1] = pool
      end
    end
    local old_endpoint = pool.config.endpoint or config.endpoint
    named[name] = true
    if everything or changed.pools[name] or changed.endpoints[old_endpoint] or changed.endpoints[config.endpoint] then
      rotation.lift(step, pool, old_endpoint, old_config.policy)
      pool.config = config
      pools.configure(step, pool)
      moved[#moved + 1] = pool
    end
  end
  remove_pools(step, details, named, old_config.policy)
  for _, pool in ipairs(restored) do rotation.take_out(step, pool) end
  if restored[1] then slots.recount(step) end
  for _, pool in ipairs(moved) do rotation.place_anew(step, pool) end
  -- Whoever had the turn on an endpoint may have been lifted: the next may come.
  for _, config in ipairs(document.endpoints) do rotation.use_room(step, endpoints.get(step, config.endpoint_id)) end
  for _, endpoint in ipairs(gone) do
    if endpoint.record.in_flight == 0 then endpoints.remove(step, endpoint.name) end
  end
  -- A raised group cap moves no pool and still makes work launchable; whoever wakes and is satisfied rings the next.
  if rotation.anyone(step) then wake.ring(step) end
end

return placement
