--- request_submit: admit a producer's requests into their pools, or say of each why not.
-- Keys:    group root
-- Args:    contract, producer, session, liveness_ms (how long the producer counts as alive from now), count, then per
--          request: request_id, pool, nonce, model, message_count ("" = none), images, pages, estimated_cost_units
--          ("" = none), timeout_ms ("" = the pool's default), body_bytes, envelope, body ("" when it is larger than
--          inline_body_bytes and was stored by SET before), fairness_key ("" = none), priority ("" = the usual),
--          idempotency (hash of the caller's key, "" = none), fingerprint (of what is asked for, "" = none), detached
--          (1 = nobody waits for the reply: it is kept to be fetched by id; 0), max_wait_ms (longest time in the queue,
--          "" = until the deadline)
-- Answers: per request five cells: ADMITTED deadline_ms server_ms lapsed(1 = the producer's liveness had run out) "" |
--          EXISTS state same(1|0|"" = no fingerprint) request_id ending |
--          REPLAY request_id frame "" "" (what its idempotency key stands for has ended so) |
--          REFUSED reason value limit retry_after_ms (-1 = unknown) |
--          FAULT text "" "" "" (an error that is about this request alone)
-- Errors:  CONTRACT_MISMATCH, GROUP_UNKNOWN, POOL_UNKNOWN, BAD_ARGUMENT, STATE_CONFLICT
-- Moves:   none -> queued
-- Touches: group, pool, request, request_body, requests, flow, flows, idle_flows, deadlines, rotation, kept, heads,
--          alive, wake, endpoint, idempotency, result, endings
-- Flags:   (none)
-- Cost:    linear in count; bodies cross Lua only when they are small
-- Twice:   same id and nonce: the first answer, nothing is queued again; another nonce: EXISTS
local cost = require("lib.cost")
local drain = require("lib.drain")
local endings = require("state.endings")
local faults = require("state.faults")
local flows = require("state.flows")
local group = require("state.group")
local intake = require("state.intake")
local names = require("lib.names")
local pools = require("state.pools")
local producers = require("state.producers")
local requests = require("state.requests")
local results = require("state.results")
local schema = require("schema")
local state = require("state.step")
local wake = require("state.wake")

local FIRST_REQUEST, REQUEST_LENGTH = 5, 18

-- What passes by itself as the pool drains.
local FULL = { pool_full = true, pool_bytes_full = true, group_full = true }

local function refuse(step, pool, request, reason, value, limit)
  requests.refuse_body(step, request.id, request.nonce, request.bytes)
  pools.count(pool, "rejected", reason)
  endings.reject(step, request, reason)
  local retry_after_ms = FULL[reason] and drain.retry_after_ms(pool.record, pool.config.max_queue_depth, step.now)
  return "REFUSED", reason, value, limit, retry_after_ms or -1
end

-- What is wrong with one request's arguments, as an error text.
local function problem(request)
  if not names.valid(request.id) then return faults.texts.bad_argument("request_id", request.id, names.ALLOWED) end
  if not names.valid(request.nonce) then return faults.texts.bad_argument("nonce", request.nonce, names.ALLOWED) end
  if not request.bytes or request.bytes < 0 then
    return faults.texts.bad_argument("body_bytes", request.bytes, "a whole number from 0")
  end
  if #request.envelope > schema.limits.envelope_max_bytes then
    return faults.texts.bad_argument("envelope", #request.envelope .. " bytes",
      "at most " .. schema.limits.envelope_max_bytes)
  end
  if request.fairness_key ~= "" and not names.valid(request.fairness_key) then
    return faults.texts.bad_argument("fairness_key", request.fairness_key, names.ALLOWED)
  end
  local level, levels = request.level, schema.limits.priority_levels
  if not level or level < 0 or level >= levels or level ~= math.floor(level) then
    return faults.texts.bad_argument("priority", request.level_text, "a whole number from 0 to " .. levels - 1)
  end
  if request.timeout_text ~= "" and not (request.timeout_ms and request.timeout_ms >= 1) then
    return faults.texts.bad_argument("timeout_ms", request.timeout_text, "a whole number from 1")
  end
  return nil
end

local function read(args, index, step, producer)
  local at = FIRST_REQUEST + (index - 1) * REQUEST_LENGTH
  return {
    id = args[at + 1], pool = args[at + 2], nonce = args[at + 3], model = args[at + 4],
    message_count = tonumber(args[at + 5]), images = tonumber(args[at + 6]) or 0, pages = tonumber(args[at + 7]) or 0,
    units = tonumber(args[at + 8]), timeout_text = args[at + 9], timeout_ms = tonumber(args[at + 9]),
    bytes = tonumber(args[at + 10]), envelope = args[at + 11], body = args[at + 12], fairness_key = args[at + 13],
    level = args[at + 14] == "" and schema.limits.priority_default or tonumber(args[at + 14]),
    level_text = args[at + 14],
    idempotency = args[at + 15] ~= "" and args[at + 15] or nil, fingerprint = args[at + 16],
    detached = args[at + 17] == "1" or nil, max_wait_ms = tonumber(args[at + 18]),
    producer = producer, submitted_ms = step.now,
  }
end

local function exists(request, same, id)
  return "EXISTS", request.state, same, id, request.ending or ""
end

-- What the request's idempotency key or id stands for already, as the first cells of its answer; nil if for nothing.
local function known(step, request, earlier)
  local first = request.idempotency and results.find(step, request.idempotency)
  if first then
    local other = first.id == request.id and earlier or requests.get(step, first.id) or { state = "ended" }
    if first.fingerprint ~= request.fingerprint then return exists(other, 0, first.id) end
    local frame = results.frame(step, first.id)
    if frame then return "REPLAY", first.id, frame end
    if other.state ~= "ended" then return exists(other, 1, first.id) end
  end
  if earlier then return exists(earlier, "", request.id) end
  return nil
end

-- Admit one request. Returns the five cells of its answer.
local function submit(step, request)
  local fault = problem(request)
  if fault then return "FAULT", fault, "", "", "" end
  local earlier = requests.get(step, request.id)
  if earlier and earlier.nonce == request.nonce then
    return "ADMITTED", earlier.deadline_ms, step.now, step.lapsed, ""
  end
  local word, first, second, third, fourth = known(step, request, earlier)
  if word then
    requests.refuse_body(step, request.id, request.nonce, request.bytes)
    return word, first, second, third or "", fourth or ""
  end
  local pool = pools.get(step, request.pool)
  if not pool then
    return "FAULT", faults.texts.pool_unknown(request.pool, group.details(step.root).pools), "", "", ""
  end
  local reason, value, limit = intake.refusal(step, pool, request.bytes)
  if reason then return refuse(step, pool, request, reason, value, limit) end

  local config = pool.config
  request.deadline_ms = step.now + math.min(request.timeout_ms or config.default_timeout_ms, config.max_timeout_ms)
  if request.max_wait_ms then
    request.queue_until = math.min(request.deadline_ms, step.now + math.max(0, request.max_wait_ms))
  end
  request.cost = cost.units(request.units, request.images, request.pages, step.config)
  request.flow = flows.of(step, pool, request.fairness_key)
  if not intake.admit(step, pool, request) then
    return refuse(step, pool, request, "body_missing", #request.body, request.bytes)
  end
  if request.idempotency then results.claim(step, request) end
  step.admitted = step.admitted + 1
  return "ADMITTED", request.deadline_ms, step.now, step.lapsed, ""
end

local function run(keys, args)
  if tonumber(args[1]) ~= schema.contract.version then
    return faults.contract_mismatch(args[1], schema.contract.version)
  end
  local producer, session, liveness_ms, count = args[2], args[3], tonumber(args[4]), tonumber(args[5])
  if not count or count < 1 or count > schema.limits.submit_max or #args ~= FIRST_REQUEST + count * REQUEST_LENGTH then
    return faults.bad_argument("count", args[5],
      "1 to " .. schema.limits.submit_max .. ", with " .. REQUEST_LENGTH .. " arguments each")
  end
  if not names.valid(producer) then return faults.bad_argument("producer", producer, names.ALLOWED) end
  if not liveness_ms or liveness_ms < 1 then
    return faults.bad_argument("liveness_ms", args[4], "a whole number from 1")
  end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local owner = producers.session(keys[1], producer)
  if owner and owner ~= session then return faults.state_conflict("another session owns producer " .. producer) end
  step.admitted, step.lapsed = 0, owner and 0 or 1
  local answer = {}
  for index = 1, count do
    local at = #answer
    answer[at + 1], answer[at + 2], answer[at + 3], answer[at + 4], answer[at + 5] =
      submit(step, read(args, index, step, producer))
  end
  if step.admitted > 0 then producers.refresh(step, producer, session, liveness_ms) end
  wake.ring_for(step, step.admitted)
  state.save(step)
  return answer
end

return { run = run }
