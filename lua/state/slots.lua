--- Taking and freeing the slots of pool, endpoint and group together, so that they cannot drift apart.
local endpoints = require("state.endpoints")
local pools = require("state.pools")
local queue = require("state.queue")
local rotation = require("state.rotation")

local slots = {}

function slots.take(step, pool, endpoint, units)
  pool.record.in_flight = pool.record.in_flight + 1
  pool.record.launched = pool.record.launched + 1
  pool.record.cost_served = pool.record.cost_served + units
  endpoint.record.in_flight = endpoint.record.in_flight + 1
  endpoint.record.attempts = endpoint.record.attempts + 1
  step.group.in_flight = step.group.in_flight + 1
end

--- Free the slots a lease holds: those it names, whatever the config says by now.
function slots.free(step, request)
  local pool = pools.get(step, request.pool)
  local endpoint = endpoints.get(step, request.endpoint)
  local was_blocked = endpoints.block_reason(endpoint) ~= nil or (pool ~= nil and rotation.at_cap(pool))
  step.group.in_flight = step.group.in_flight - 1
  endpoint.record.in_flight = endpoint.record.in_flight - 1
  if pool then
    pool.record.in_flight = pool.record.in_flight - 1
    rotation.freed_slot(step, pool, endpoint, was_blocked)
  else
    rotation.use_room(step, endpoint)
  end
end

--- A leased request goes back to where it stood in its pool.
function slots.give_back(step, request)
  local pool = pools.get(step, request.pool)
  slots.free(step, request)
  queue.give_back(step, pool, request)
  rotation.gained_work(step, pool)
end

return slots
