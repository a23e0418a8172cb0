--- lease_settle: end a batch of leases, push their replies, free their slots and claim the next in the same step.
-- Keys:    group root
-- Args:    gateway, dispatcher, nonce, want (0 = claim none), count, then per item: request_id fence outcome status
--          error_type error_message verdict hold_ms input_tokens output_tokens head body by_reference(0|1)
--          actual_units ("" = as estimated) retryable(0|1: nothing was answered)
--          details (JSON about the attempt, for its record; "" = none); outcome is succeeded, failed,
--          cancelled, expired, producer_gone, lost (what then happens is the pool's delivery mode) or release (give
--          back, the attempt is not counted)
-- Answers: count, a word per item (OK | LEASE_LOST | PRODUCER_GONE | REQUEUED | RETRY), then the answer of lease_claim
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   leased -> ended, leased -> queued, leased -> delayed, delayed -> queued, queued -> leased, queued -> ended
-- Touches: group, pool, request, request_body, requests, flow, flows, idle_flows, returned, rotation, kept, heads,
--          endpoint, waiting, leases, holding, deadlines, answer, alive, replies, reply_body, endings, wake,
--          wake_producer, timers, chores, events, idempotency, result, dead
-- Flags:   allow-oom
-- Cost:    linear in count and want
-- Twice:   same nonce: the same words, and those of the same leases that are still current
local admission = require("state.admission")
local answers = require("state.answers")
local cost = require("lib.cost")
local delivery = require("state.delivery")
local endings = require("state.endings")
local faults = require("state.faults")
local leases = require("state.leases")
local pools = require("state.pools")
local producers = require("state.producers")
local queue = require("state.queue")
local replies = require("state.replies")
local requests = require("state.requests")
local retry = require("lib.retry")
local rotation = require("state.rotation")
local schema = require("schema")
local slots = require("state.slots")
local state = require("state.step")
local tries = require("lib.tries")

local FIRST_ITEM, ITEM_LENGTH = 5, 16
local OUTCOMES = { succeeded = true, failed = true, cancelled = true, expired = true, lost = true, producer_gone = true,
  release = true }

local function read_item(args, index)
  local at = FIRST_ITEM + (index - 1) * ITEM_LENGTH
  return {
    id = args[at + 1], fence = tonumber(args[at + 2]), outcome = args[at + 3], status = args[at + 4],
    error_type = args[at + 5], error_message = args[at + 6], verdict = args[at + 7],
    hold_ms = tonumber(args[at + 8]) or 0, input_tokens = args[at + 9], output_tokens = args[at + 10],
    reply = { head = args[at + 11], body = args[at + 12], by_reference = args[at + 13] == "1" },
    actual_units = tonumber(args[at + 14]), retryable = args[at + 15] == "1", details = args[at + 16],
  }
end

-- Pool and key pay or get back what the request cost more or less than estimated.
local function settle_cost(step, request, item)
  local pool = item.actual_units and pools.get(step, request.pool)
  if not pool then return end
  local difference = cost.clamp(item.actual_units, step.config.cost_min, step.config.cost_max) - request.units
  if difference == 0 then return end
  pool.record.cost_served = pool.record.cost_served + difference
  queue.settle(step, pool, request.flow, difference)
  rotation.settle_cost(step, pool, difference)
end

-- When the next attempt of a failed request is due, nil = there is none.
local function retry_due(step, request, item)
  local pool = item.outcome == "failed" and not request.cancel and not request.stream and pools.get(step, request.pool)
  if not pool or request.attempt >= pool.config.max_attempts or not retry.wanted(item, pool.config.retry_on) then
    return nil
  end
  if not producers.reachable(step, request) then return nil end
  -- The jitter needs no randomness of its own, only a fraction that nobody can choose.
  local digest = server.sha1hex(request.id .. ":" .. request.fence)
  local fraction = tonumber(string.sub(digest, 1, 8), 16) / 2 ^ 32
  local hold_ms = math.min(item.hold_ms, step.config.hold_max_ms)
  local due = step.now + retry.delay_ms(pool.config, request.attempt, fraction, hold_ms)
  if due >= request.deadline_ms or not retry.spend(step.group, step.config, step.now) then return nil end
  return due
end

-- Put a request that has not ended back. Returns the word for it, nil when it ends after all (as `item.outcome`).
local function again(step, request, item, about)
  -- Of a stream that has begun its caller has seen a part: no other run may follow, whoever gives it back.
  if item.outcome == "release" and request.stream then item.outcome = "lost" end
  if item.outcome == "release" then
    if request.cancel then
      item.outcome = "cancelled" -- nobody wants it run again
    elseif step.now >= request.deadline_ms then
      item.outcome = "expired"
    else
      request.attempt = request.attempt - 1
      slots.give_back(step, request, about)
      return "REQUEUED"
    end
  elseif item.outcome == "lost" then
    local ending = delivery.after_loss(step, request, item.error_message)
    if not ending then
      delivery.run_again(step, request, item.details)
      return "REQUEUED"
    end
    item.outcome = ending
  else
    local due = retry_due(step, request, item)
    if due then
      tries.add(request, step.now, item.status, item.error_type, item.details)
      slots.delay(step, request, due, about)
      if item.reply.by_reference then replies.forget_body(step, request.id) end
      return "RETRY"
    end
  end
  return nil
end

-- Settle one lease that is held. Returns the word for it.
local function settle(step, request, item)
  local about = { verdict = item.verdict, hold_ms = item.hold_ms, error_type = item.error_type,
    gateway = request.gateway }
  local word = again(step, request, item, about)
  if word then return word end
  local ending = item.outcome
  word = "OK"
  if not producers.reachable(step, request) then
    word = "PRODUCER_GONE"
    if ending == "succeeded" or ending == "failed" then ending = "reply_dropped" end
  end
  item.outcome = ending == "reply_dropped" and item.outcome or ending
  endings.finish(step, request, ending, item)
  settle_cost(step, request, item)
  slots.free(step, request, about)
  return word
end

-- The requests whose leases the items name and the gateway holds, by index, and whether it holds all. An id that stands
-- twice is one request: settled once, it is held no more.
local function read_held(step, gateway, items, ids)
  local held, all_held, by_id = {}, true, {}
  local ends = leases.ends(step, ids)
  for index, item in ipairs(items) do
    local request = by_id[item.id] or requests.get(step, item.id)
    by_id[item.id] = request
    if leases.held(step, gateway, item, request, ends[index]) then
      held[index] = request
    else
      all_held = false
    end
  end
  return held, all_held
end

-- Settle what is held. Returns a word for each item.
local function settle_held(step, gateway, items, held)
  local words, settled = {}, {}
  for index, item in ipairs(items) do
    local request = held[index]
    if request and request.state == "leased" then
      words[index] = settle(step, request, item)
      settled[#settled + 1] = item.id
    else
      words[index] = "LEASE_LOST"
    end
  end
  leases.remove(step, gateway, settled)
  return words
end

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local claim = { gateway = args[1], dispatcher = args[2], nonce = args[3] }
  local want, count = tonumber(args[4]), tonumber(args[5])
  if not want or want < 0 or want > schema.limits.claim_max then
    return faults.bad_argument("want", args[4], "0 to " .. schema.limits.claim_max)
  end
  if not count or count > schema.limits.settle_max or #args ~= FIRST_ITEM + count * ITEM_LENGTH then
    return faults.bad_argument("count", args[5],
      "at most " .. schema.limits.settle_max .. ", with " .. ITEM_LENGTH .. " arguments each")
  end
  local items, ids = {}, {}
  for index = 1, count do
    items[index] = read_item(args, index)
    ids[index] = items[index].id
    if not OUTCOMES[items[index].outcome] then
      return faults.bad_argument("outcome", items[index].outcome,
        "succeeded, failed, cancelled, expired, lost, producer_gone, release")
    end
  end

  local held, all_held = read_held(step, claim.gateway, items, ids)
  -- What a call settled is held no more, so one whose items all are is no repeat.
  local words, made
  if count == 0 or not all_held then words, made = answers.recall(step, claim.gateway, claim.nonce) end
  local sleep_ms, call_again = 0, true
  if not words then
    words = settle_held(step, claim.gateway, items, held)
    made, sleep_ms, call_again = admission.claim(step, claim, want)
    answers.remember(step, claim.gateway, claim.nonce, words, made)
    state.save(step)
  end
  local answer = { #words }
  for _, word in ipairs(words) do answer[#answer + 1] = word end
  return admission.append_claim(answer, step, { made = made, sleep_ms = sleep_ms, again = call_again })
end

return { run = run }
