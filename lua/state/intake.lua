--- Taking a request into its pool: what refuses it, and what is done when nothing does.
local endpoints = require("state.endpoints")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")

local intake = {}

--- The first limit that a request with a body of `bytes` would break: reason, what is there, what is allowed; or nil.
function intake.refusal(step, pool, bytes)
  local config, record = pool.config, pool.record
  if not config.enabled then return "pool_disabled", 0, 0 end
  if record.draining then return "pool_draining", record.depth, 0 end
  if bytes > step.config.max_payload_bytes then return "body_too_large", bytes, step.config.max_payload_bytes end
  if record.depth >= config.max_queue_depth then return "pool_full", record.depth, config.max_queue_depth end
  if record.bytes + bytes > config.max_queue_bytes then
    return "pool_bytes_full", record.bytes, config.max_queue_bytes
  end
  if step.group.queued >= step.config.max_queued then return "group_full", step.group.queued, step.config.max_queued end
  if config.on_open == "reject"
    and endpoints.block_reason(step, endpoints.get(step, config.endpoint)) == "endpoint_open" then
    return "endpoint_open", 0, 0
  end
  return nil
end

--- Store the request and put it into its pool, which gets backlog by it. False, and nothing is done, when its body is
-- not there.
function intake.admit(step, pool, request)
  request.seq = step.group.seq + 1
  if not requests.admit(step, request) then return false end
  step.group.seq = request.seq
  queue.append(step, pool, request)
  rotation.gained_work(step, pool)
  pool.record.submitted = pool.record.submitted + 1
  return true
end

return intake
