--- Taking and freeing the slots of pool, endpoint and group together, so that they cannot drift apart.
local drain = require("lib.drain")
local endpoints = require("state.endpoints")
local group = require("state.group")
local leases = require("state.leases")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")
local timers = require("state.timers")

local slots = {}

--- Take the slots of a request that is launched. Returns until when it must have ended if it is a breaker's probe.
function slots.take(step, pool, request)
  pool.record.in_flight = pool.record.in_flight + 1
  pool.record.launched = pool.record.launched + 1
  drain.count(pool.record, step.now)
  pool.record.cost_served = pool.record.cost_served + request.units
  step.group.in_flight = step.group.in_flight + 1
  return endpoints.launched(step, endpoints.get(step, request.endpoint), request)
end

-- More leases than this would hold up the server; their counts are left to an audit.
local RECOUNTED_MAX = 2000

local function free_some(step, pool, in_flight)
  if pool.record.in_flight == in_flight then return end
  pool.record.in_flight = in_flight
  rotation.freed_slot(step, pool, endpoints.get(step, pool.config.endpoint), true)
end

--- Count the running requests of group, endpoints and pools anew, from the leases. For the case that a request vanished
-- while it ran: nobody knows any more which slots it held.
function slots.recount(step)
  local ids = leases.first(step, RECOUNTED_MAX + 1)
  if #ids > RECOUNTED_MAX then return end
  local by_pool, by_endpoint, running = {}, {}, 0
  for _, id in ipairs(ids) do
    local request = requests.get(step, id)
    if request and request.state == "leased" then
      running = running + 1
      by_pool[request.pool] = (by_pool[request.pool] or 0) + 1
      by_endpoint[request.endpoint] = (by_endpoint[request.endpoint] or 0) + 1
    end
  end
  local details = group.details(step.root)
  step.group.in_flight = running
  for _, name in ipairs(details.endpoints) do
    endpoints.get(step, name).record.in_flight = by_endpoint[name] or 0
  end
  for _, name in ipairs(details.pools) do
    local pool = pools.get(step, name)
    if pool then free_some(step, pool, by_pool[name] or 0) end
  end
  for _, name in ipairs(details.endpoints) do rotation.use_room(step, endpoints.get(step, name)) end
end

local NO_VERDICT = { verdict = "neutral" }

--- Free the slots a lease holds: those it names, whatever the config says by now. `about`: what the run says of its
-- endpoint (state/endpoints.lua), nil when it came to no end.
function slots.free(step, request, about)
  local pool = pools.get(step, request.pool)
  local endpoint = endpoints.get(step, request.endpoint)
  local was_blocked = endpoints.block_reason(step, endpoint) ~= nil or (pool ~= nil and rotation.at_cap(pool))
  endpoints.note(step, endpoint, request.id, request.fence, about or NO_VERDICT)
  step.group.in_flight = step.group.in_flight - 1
  endpoint.record.in_flight = endpoint.record.in_flight - 1
  if pool then pool.record.in_flight = pool.record.in_flight - 1 end
  if math.min(step.group.in_flight, endpoint.record.in_flight, pool and pool.record.in_flight or 0) < 0 then
    slots.recount(step) -- a record was lost and made again
  elseif pool then
    rotation.freed_slot(step, pool, endpoint, was_blocked)
  else
    rotation.use_room(step, endpoint)
  end
end

--- A leased request goes back to where it stood in its pool. Its attempt stays counted.
function slots.give_back(step, request, about)
  local pool = pools.get(step, request.pool)
  slots.free(step, request, about)
  requests.requeue(step, request)
  queue.give_back(step, pool, request)
  rotation.gained_work(step, pool)
end

--- A leased request waits until `due` for its next attempt, outside its pool's lists.
function slots.delay(step, request, due, about)
  local pool = pools.get(step, request.pool)
  slots.free(step, request, about)
  requests.delay(step, request, due)
  timers.set(step, "retry:" .. request.id, due)
  step.group.delayed = (step.group.delayed or 0) + 1
  pool.record.delayed = (pool.record.delayed or 0) + 1
end

--- A request waits for its next attempt no more. `due`: its timer has fired and is gone.
function slots.undelay(step, request, due)
  local pool = pools.get(step, request.pool)
  if not due then timers.clear(step, "retry:" .. request.id) end
  step.group.delayed = math.max(0, (step.group.delayed or 0) - 1)
  if pool then pool.record.delayed = math.max(0, (pool.record.delayed or 0) - 1) end
end

return slots
