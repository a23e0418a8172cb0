--- request_submit: admit a request into its pool, or say why not.
-- Keys:    group root
-- Args:    contract, request_id, pool, producer, session, nonce, model, message_count ("" = none), images, pages,
--          estimated_cost_units ("" = none), timeout_ms ("" = the pool's default), liveness_ms (how long the producer
--          counts as alive from now), body_bytes, envelope, body ("" when it was stored by SET before)
-- Answers: ADMITTED deadline_ms server_ms | EXISTS state | REFUSED reason value limit retry_after_ms (-1 = unknown)
-- Errors:  CONTRACT_MISMATCH, GROUP_UNKNOWN, POOL_UNKNOWN, BAD_ARGUMENT
-- Moves:   none -> queued
-- Touches: group, pool, request, request_body, requests, deadlines, rotation, kept, heads, alive, wake
-- Flags:   (none)
-- Cost:    constant; the body crosses Lua only when it is small
-- Twice:   same id and nonce: the first answer, nothing is queued again; another nonce: EXISTS
local cost = require("lib.cost")
local faults = require("state.faults")
local group = require("state.group")
local names = require("lib.names")
local pools = require("state.pools")
local producers = require("state.producers")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")
local schema = require("schema")
local state = require("state.step")
local wake = require("state.wake")

-- The first limit the request would break: reason, what is there, what is allowed.
local function refusal(step, pool, bytes)
  local config, record = pool.config, pool.record
  if not config.enabled then return "pool_disabled", 0, 0 end
  if bytes > step.config.max_payload_bytes then return "body_too_large", bytes, step.config.max_payload_bytes end
  if record.depth >= config.max_queue_depth then return "pool_full", record.depth, config.max_queue_depth end
  if record.bytes + bytes > config.max_queue_bytes then
    return "pool_bytes_full", record.bytes, config.max_queue_bytes
  end
  if step.group.queued >= step.config.max_queued then return "group_full", step.group.queued, step.config.max_queued end
  return nil
end

local function refuse(step, pool, request, answer)
  requests.forget_body(step, request.id, request.nonce)
  pools.count(pool, "rejected", answer[2])
  state.save(step)
  return answer
end

local function problem(args, bytes, timeout)
  for position, name in pairs({ [2] = "request_id", [4] = "producer", [6] = "nonce" }) do
    if not names.valid(args[position]) then return faults.bad_argument(name, args[position], names.ALLOWED) end
  end
  if not bytes or bytes < 0 then return faults.bad_argument("body_bytes", args[14], "a whole number from 0") end
  if args[16] ~= "" and #args[16] ~= bytes then
    return faults.bad_argument("body", #args[16] .. " bytes", "body_bytes (" .. bytes .. ") bytes, or none")
  end
  if args[12] ~= "" and not (timeout and timeout >= 1) then
    return faults.bad_argument("timeout_ms", args[12], "a whole number from 1")
  end
  return nil
end

local function run(keys, args)
  if #args ~= 16 then return faults.bad_argument("argument count", #args, "16") end
  if tonumber(args[1]) ~= schema.contract.version then
    return faults.contract_mismatch(args[1], schema.contract.version)
  end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local bytes, timeout = tonumber(args[14]), tonumber(args[12])
  local fault = problem(args, bytes, timeout)
  if fault then return fault end
  local request = { id = args[2], pool = args[3], producer = args[4], nonce = args[6], model = args[7],
    message_count = args[8], bytes = bytes, envelope = args[15], submitted_ms = step.now }

  local earlier = requests.brief(step, request.id)
  if earlier and earlier.nonce == request.nonce then return { "ADMITTED", earlier.deadline_ms, step.now } end
  if earlier then
    requests.forget_body(step, request.id, request.nonce)
    return { "EXISTS", earlier.state }
  end
  local pool = pools.get(step, request.pool)
  if not pool then return faults.pool_unknown(request.pool, group.details(keys[1]).pools) end
  local reason, value, limit = refusal(step, pool, bytes)
  if reason then return refuse(step, pool, request, { "REFUSED", reason, value, limit, -1 }) end

  local config = pool.config
  request.deadline_ms = step.now + math.min(timeout or config.default_timeout_ms, config.max_timeout_ms)
  request.cost = cost.units(tonumber(args[11]), tonumber(args[9]) or 0, tonumber(args[10]) or 0, step.config)
  request.seq = step.group.seq + 1
  if not requests.admit(step, request, args[16]) then
    return refuse(step, pool, request, { "REFUSED", "body_missing", 0, bytes, -1 })
  end
  step.group.seq = request.seq
  producers.refresh(step, request.producer, args[5], tonumber(args[13]) or step.config.liveness_ms)
  queue.append(step, pool, request)
  rotation.gained_work(step, pool)
  pool.record.submitted = pool.record.submitted + 1
  wake.ring(step)
  state.save(step)
  return { "ADMITTED", request.deadline_ms, step.now }
end

return { run = run }
