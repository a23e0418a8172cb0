--- Bringing a changed config into force: every pool keeps its credit, its turn and its running requests, and is placed
-- anew under the new rules. Whatever becomes launchable by it rings the wake list.
local clock = require("state.clock")
local endpoints = require("state.endpoints")
local group = require("state.group")
local pools = require("state.pools")
local queue = require("state.queue")
local rotation = require("state.rotation")
local wake = require("state.wake")

local placement = {}

--- A step for a group that was never configured.
function placement.first_step(root)
  return { root = root, now = clock.now_ms(), config = {}, group = group.new_record(), pools = {}, endpoints = {},
    ended = 0 }
end

local function differs(old, new)
  for name, value in pairs(new) do
    if old[name] ~= value then return true end
  end
  for name in pairs(old) do
    if new[name] == nil then return true end
  end
  return false
end

-- Endpoints that are new or changed get their config; those left out go when nothing runs on them.
local function apply_endpoints(step, details, wanted)
  local changed = {}
  for _, config in ipairs(wanted.endpoints) do
    local endpoint = endpoints.get(step, config.endpoint_id)
    if differs(endpoint.config, config) then
      endpoint.config = config
      endpoints.configure(step, endpoint)
      changed[endpoint.name] = true
    end
  end
  for _, name in ipairs(details.endpoints) do
    if not wanted.served[name] then
      local endpoint = endpoints.get(step, name)
      changed[name] = true
      endpoint.config = {}
      if endpoint.record.in_flight == 0 then
        endpoints.remove(step, name)
      else
        endpoints.configure(step, endpoint)
      end
    end
  end
  return changed
end

--- Apply `wanted` = { pools, endpoints, wanted = pools by id, served = endpoints by id } to a step whose config is the
-- new one already.
function placement.apply(step, old_config, details, wanted)
  local everything = old_config.policy ~= step.config.policy or old_config.cost_max ~= step.config.cost_max
  local moved = {}
  local function lift(pool, old_endpoint)
    rotation.lift(step, pool, old_endpoint, old_config.policy)
    moved[#moved + 1] = pool
  end

  local lifted_from = {}
  for _, config in ipairs(wanted.pools) do
    local pool = pools.get(step, config.pool_id)
    if not pool then
      pool = { name = config.pool_id, config = {}, record = pools.new_record() }
    end
    lifted_from[pool.name] = pool.config.endpoint or config.endpoint
    wanted.wanted[pool.name] = { pool = pool, config = config, changed = differs(pool.config, config) }
  end
  local changed_endpoints = apply_endpoints(step, details, wanted)
  for _, config in ipairs(wanted.pools) do
    local change = wanted.wanted[config.pool_id]
    local pool, old_endpoint = change.pool, lifted_from[config.pool_id]
    if everything or change.changed or changed_endpoints[old_endpoint] or changed_endpoints[config.endpoint] then
      lift(pool, old_endpoint)
      pool.config = config
      pools.configure(step, pool)
    end
  end
  for _, name in ipairs(details.pools) do
    if not wanted.wanted[name] then
      local pool = pools.get(step, name)
      if pool then
        rotation.lift(step, pool, pool.config.endpoint, old_config.policy)
        pools.remove(step, name)
        queue.remove(step, name)
      end
    end
  end
  for _, pool in ipairs(moved) do rotation.place_anew(step, pool) end
  for _ = 1, #moved do wake.ring(step) end
end

return placement
