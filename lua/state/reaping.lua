--- What time ends: leases that ran out and requests past their deadline. Bounded batches.
local delivery = require("state.delivery")
local endings = require("state.endings")
local leases = require("state.leases")
local pools = require("state.pools")
local producers = require("state.producers")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")
local slots = require("state.slots")

local reaping = {}

local LOST = "the gateway that ran the request stopped renewing its lease"
local EXPIRED = "the deadline passed"

local function end_lease(step, request, ending, message)
  endings.finish(step, request, ending, { error_type = ending, error_message = message })
  slots.free(step, request)
end

--- End or give back leases that ran out; what happens is the pool's delivery mode. Nothing while an outage is digested.
-- Returns lost, given back, expired, and whether the bound was reached.
function reaping.reap_leases(step, limit)
  if producers.in_grace(step) then return 0, 0, 0, false end
  local lost, returned, expired, vanished = 0, 0, 0, false
  local ids = leases.expired(step, limit)
  for _, id in ipairs(ids) do
    local request = requests.get(step, id)
    if not request or request.state ~= "leased" then
      leases.forget(step, id)
      if not request then requests.forget_deadline(step, id) end
      vanished = true
    else
      leases.remove(step, request.gateway, { id })
      local ending, message = delivery.after_loss(step, request, LOST)
      if ending then
        end_lease(step, request, ending, message)
        if ending == "expired" then expired = expired + 1 end
        if ending == "lost" or ending == "dead" then lost = lost + 1 end
      else
        delivery.run_again(step, request)
        returned = returned + 1
      end
    end
  end
  if vanished then slots.recount(step) end -- what they held stood in their requests
  return lost, returned, expired, #ids == limit
end

--- End requests whose deadline has passed, wherever they wait. A running one is stopped by its gateway; if that does
-- not happen within a lease time, it is ended here: no lease lives for ever.
-- Returns how many ended and whether the bound was reached.
function reaping.expire(step, limit)
  local ended = 0
  local ids = requests.past_deadline(step, limit)
  for _, id in ipairs(ids) do
    local request = requests.get(step, id)
    if not request or request.state == "ended" then
      requests.forget_deadline(step, id)
    elseif request.state == "queued" then
      local pool = pools.get(step, request.pool)
      queue.bury(step, pool, request.bytes)
      endings.finish(step, request, "expired", requests.waited_out(step, request)
        or { error_type = "expired", error_message = EXPIRED .. " while it waited" })
      if pool then rotation.lost_work(step, pool) end
      ended = ended + 1
    elseif request.state == "delayed" then
      endings.finish(step, request, "expired",
        { error_type = "expired", error_message = EXPIRED .. " before the next attempt" })
      slots.undelay(step, request)
      ended = ended + 1
    elseif step.now >= request.deadline_ms + step.config.lease_ms then
      leases.remove(step, request.gateway, { id })
      end_lease(step, request, "expired", EXPIRED .. " and the gateway did not stop")
      ended = ended + 1
    else
      requests.postpone_deadline(step, request)
    end
  end
  return ended, #ids == limit
end

return reaping
