--- request_cancel: end a waiting request at once; ask the gateway of a running one to stop.
-- Keys:    group root
-- Args:    request_id, actor, reason, scope ("" = waiting or running; waiting = a running one is left alone)
-- Answers: CANCELLED "" | CANCELLING gateway | RUNNING gateway (left alone) | ENDED ending | UNKNOWN ""
-- Errors:  GROUP_UNKNOWN
-- Moves:   queued -> ended, delayed -> ended
-- Touches: group, pool, request, request_body, requests, returned, deadlines, rotation, kept, heads, endpoint, waiting,
--          alive, replies, wake_producer, endings, wake_gateway, timers, idempotency, result
-- Flags:   allow-oom
-- Cost:    constant (the entry becomes a tombstone)
-- Twice:   ENDED cancelled, or CANCELLING again
local endings = require("state.endings")
local faults = require("state.faults")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")
local slots = require("state.slots")
local state = require("state.step")
local wake = require("state.wake")

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local id, actor, reason, scope = args[1], args[2], args[3] or "", args[4] or ""
  local request = requests.get(step, id)
  if not request then return { "UNKNOWN", "" } end
  if request.state == "ended" then return { "ENDED", request.ending or "" } end
  if request.state == "leased" and scope == "waiting" then return { "RUNNING", request.gateway } end
  local by = actor .. (reason ~= "" and ": " .. reason or "")
  if request.state == "leased" then
    requests.flag_cancel(step, id, by)
    wake.ring_gateway(step, request.gateway)
    return { "CANCELLING", request.gateway }
  end
  local facts = { error_type = "cancelled", error_message = "cancelled by " .. by }
  if request.state == "delayed" then
    endings.finish(step, request, "cancelled", facts)
    slots.undelay(step, request)
  else
    local pool = pools.get(step, request.pool)
    queue.bury(step, pool, request.bytes)
    endings.finish(step, request, "cancelled", facts)
    if pool then rotation.lost_work(step, pool) end
  end
  state.save(step)
  return { "CANCELLED", "" }
end

return { run = run }
