--- Delivery modes: what becomes of a request whose run came to no end (its gateway died, or broke it off).
local pools = require("state.pools")
local slots = require("state.slots")
local tries = require("lib.tries")

local delivery = {}

local EXPIRED = "the deadline passed"
local DEAD = "no attempt came to an end; max_attempts are spent"

--- The ending of a leased request whose run came to no end, with a sentence; nil = it is to be run again (never when
-- its caller has seen a part of a stream).
-- `lost`: the sentence that its caller is told in an at_most_once pool.
function delivery.after_loss(step, request, lost)
  local pool = pools.get(step, request.pool)
  if request.cancel then return "cancelled", "cancelled by " .. request.cancel end
  if not pool or pool.config.delivery ~= "at_least_once" or request.stream then return "lost", lost end
  if step.now >= request.deadline_ms then return "expired", EXPIRED end
  if request.attempt >= pool.config.max_attempts then return "dead", DEAD end
  return nil
end

--- Back to where it stood in its pool; the attempt counts. `details` of it: lib/tries.lua.
function delivery.run_again(step, request, details)
  tries.add(request, step.now, "", "lost", details)
  slots.give_back(step, request)
end

return delivery
