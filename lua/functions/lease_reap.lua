--- lease_reap: end or give back leases that ran out, and end requests past their deadline.
-- Keys:    group root
-- Args:    limit (of each kind)
-- Answers: server_ms lost requeued expired more(0|1)
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   leased -> ended, leased -> queued, queued -> ended, delayed -> queued, delayed -> ended
-- Touches: group, pool, request, request_body, requests, returned, rotation, kept, heads, endpoint, waiting, leases,
--          holding, deadlines, alive, replies, wake_producer, endings, wake, gateway, gateways,
--          timers, chores, events, idempotency, result, dead
-- Flags:   allow-oom
-- Cost:    linear in limit
-- Twice:   the second finds what the first left
local due = require("state.due")
local endings = require("state.endings")
local faults = require("state.faults")
local gateways = require("state.gateways")
local reaping = require("state.reaping")
local rotation = require("state.rotation")
local schema = require("schema")
local state = require("state.step")
local wake = require("state.wake")

local GATEWAYS_PER_CALL = 100

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local limit = tonumber(args[1])
  if not limit or limit < 1 or limit > schema.limits.reap_max then
    return faults.bad_argument("limit", args[1], "1 to " .. schema.limits.reap_max)
  end
  local lost, returned, expired, more_leases = reaping.reap_leases(step, limit)
  local late, more_deadlines = reaping.expire(step, limit)
  endings.note_left_out(step)
  gateways.forget_expired(step, GATEWAYS_PER_CALL)
  local came_due = due.run(step)
  if (came_due or step.ended + returned > 0) and rotation.anyone(step) then wake.ring(step) end
  state.save(step)
  return { step.now, lost, returned, expired + late, (more_leases or more_deadlines) and 1 or 0 }
end

return { run = run }
