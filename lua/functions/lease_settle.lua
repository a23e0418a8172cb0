--- lease_settle: end a batch of leases, push their replies, free their slots and claim the next in the same step.
-- Keys:    group root
-- Args:    gateway, dispatcher, nonce, want (0 = claim none), count, then per item: request_id fence outcome status
--          error_type error_message verdict hold_ms input_tokens output_tokens head body by_reference(0|1)
--          actual_units ("" = as estimated); outcome is succeeded, failed, cancelled, expired, lost or release (give
--          back, the attempt is not counted)
-- Answers: count, a word per item (OK | LEASE_LOST | PRODUCER_GONE | REQUEUED), then the answer of lease_claim
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   leased -> ended, leased -> queued, queued -> leased, queued -> ended
-- Touches: group, pool, request, request_body, requests, flow, flows, idle_flows, returned, rotation, kept, heads,
--          endpoint, waiting, leases, holding, deadlines, answer, alive, replies, reply_body, endings, wake,
--          wake_producer
-- Flags:   allow-oom
-- Cost:    linear in count and want
-- Twice:   same nonce: the same words, and those of the same leases that are still current
local admission = require("state.admission")
local answers = require("state.answers")
local cost = require("lib.cost")
local endings = require("state.endings")
local endpoints = require("state.endpoints")
local faults = require("state.faults")
local leases = require("state.leases")
local pools = require("state.pools")
local producers = require("state.producers")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")
local schema = require("schema")
local slots = require("state.slots")
local state = require("state.step")

local FIRST_ITEM, ITEM_LENGTH = 5, 14
local OUTCOMES = { succeeded = true, failed = true, cancelled = true, expired = true, lost = true, release = true }

local function read_item(args, index)
  local at = FIRST_ITEM + (index - 1) * ITEM_LENGTH
  return {
    id = args[at + 1], fence = tonumber(args[at + 2]), outcome = args[at + 3], status = args[at + 4],
    error_type = args[at + 5], error_message = args[at + 6], verdict = args[at + 7],
    hold_ms = tonumber(args[at + 8]) or 0, input_tokens = args[at + 9], output_tokens = args[at + 10],
    reply = { head = args[at + 11], body = args[at + 12], by_reference = args[at + 13] == "1" },
    actual_units = tonumber(args[at + 14]),
  }
end

-- Whether the gateway still holds the lease: same fence, and not run out (after an outage that is not held against it).
-- A lease that is in no index was taken out by others: who takes it out here ends it in the same step.
local function holds(step, gateway, item, request, lease_end)
  return request ~= nil and request.state == "leased" and request.gateway == gateway and request.fence == item.fence
    and (not lease_end or lease_end >= step.now or producers.in_grace(step))
end

local function note_endpoint(step, request, item)
  local record = endpoints.get(step, request.endpoint).record
  if item.verdict ~= "failure" then return end
  record.failures = record.failures + 1
  record.last_error, record.last_error_ms = item.error_type, step.now
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

-- Settle one lease that is held. Returns the word for it.
local function settle(step, request, item)
  note_endpoint(step, request, item)
  local ending, word = item.outcome, "OK"
  if ending == "release" and request.cancel then
    ending = "cancelled" -- nobody wants it run again
  elseif ending == "release" and step.now >= request.deadline_ms then
    ending = "expired"
  elseif ending == "release" then
    request.attempt = request.attempt - 1
    requests.requeue(step, request)
    slots.give_back(step, request)
    return "REQUEUED"
  end
  if not producers.alive(step, request.producer) then
    word = "PRODUCER_GONE"
    if ending == "succeeded" or ending == "failed" then ending = "reply_dropped" end
  end
  item.outcome = ending == "reply_dropped" and item.outcome or ending
  endings.finish(step, request, ending, item)
  settle_cost(step, request, item)
  slots.free(step, request)
  return word
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
        "succeeded, failed, cancelled, expired, lost, release")
    end
  end

  local words, made = answers.recall(step, claim.gateway, claim.nonce)
  local sleep_ms, again = 0, true
  if not words then
    words = {}
    local settled, ends = {}, leases.ends(step, ids)
    for index, item in ipairs(items) do
      local request = requests.get(step, item.id)
      if holds(step, claim.gateway, item, request, ends[index]) then
        words[index] = settle(step, request, item)
        settled[#settled + 1] = item.id
      else
        words[index] = "LEASE_LOST"
      end
    end
    leases.remove(step, claim.gateway, settled)
    made, sleep_ms, again = admission.claim(step, claim, want)
    answers.remember(step, claim.gateway, claim.nonce, words, made)
    state.save(step)
  end
  local answer = { #words }
  for _, word in ipairs(words) do answer[#answer + 1] = word end
  for _, cell in ipairs({ step.now, step.config.generation, sleep_ms, again and 1 or 0, step.ended, #made }) do
    answer[#answer + 1] = cell
  end
  return admission.append_rows(answer, made)
end

return { run = run }
