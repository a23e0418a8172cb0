--- Peek, check, pop: which waiting requests leave their pools now.
--
-- Order of the checks: room in the group (else nothing is moved and nothing credited); kept pools, one launch each in
-- turn; then the pool with the lowest turn: dead heads are ended, its visit is credited (unless it is blocked), a visit
-- that cannot pay its head ends, a pool that is blocked parks, and what is left launches. Each call is bounded in dead
-- heads and barren visits.
local chores = require("state.chores")
local drr = require("lib.drr")
local due = require("state.due")
local endings = require("state.endings")
local endpoints = require("state.endpoints")
local leases = require("state.leases")
local passes = require("state.passes")
local pools = require("state.pools")
local producers = require("state.producers")
local queue = require("state.queue")
local requests = require("state.requests")
local retry = require("lib.retry")
local rotation = require("state.rotation")
local schema = require("schema")
local slots = require("state.slots")
local wake = require("state.wake")

local admission = {}

local IDLE_SLEEP_MS = 5000

local GONE = {
  expired = "the deadline passed while the request waited",
  producer_gone = "the producer stopped refreshing its liveness",
  malformed = "the stored request or its body cannot be read",
}

-- Why a head must not launch: an ending, "tombstone", or nil when it is well.
local function fate(step, pool, head, request)
  if not request then
    if head.deadline_ms > 0 and step.now > head.deadline_ms and pool.record.tombstones > 0 then return "tombstone" end
    return "malformed"
  end
  if request.state ~= "queued" or request.seq ~= head.seq then return "tombstone" end
  if step.now >= requests.waits_until(request) then return "expired" end
  if not request.envelope or (request.body and not requests.body_is_whole(request)) then return "malformed" end
  if not producers.reachable(step, request) then return "producer_gone" end
  return nil
end

local function end_head(step, pool, head, request, ending)
  queue.drop_head(step, pool, head)
  if ending == "malformed" then pools.skip(step, pool, "malformed_head") end
  if ending == "tombstone" then
    pool.record.tombstones = math.max(0, pool.record.tombstones - 1)
    return
  end
  if not request then -- nothing is known but what the entry says
    request = { id = head.id, state = "queued", pool = pool.name, producer = "", nonce = "", cost = head.cost,
      bytes = head.bytes, seq = head.seq, submitted_ms = head.submitted_ms, deadline_ms = step.now, attempt = 0,
      gateway = "", endpoint = "" }
  end
  if head.seq > 0 then queue.count_out(step, pool, request.bytes) end -- a foreign entry was never counted
  -- Its entry has left the list, so it needs to stand no longer than any other finished request.
  local waited = ending == "expired" and requests.waited_out(step, request)
  request.deadline_ms = math.min(request.deadline_ms, step.now)
  endings.finish(step, request, ending, waited or { error_type = ending, error_message = GONE[ending] })
end

-- The first request of the pool that may launch, with its entry. Dead ones before it are ended, within the budget.
-- `launches` says of an entry whether it will be launched if it is well: only then is its body read.
local function live_head(step, pool, budget, launches)
  while true do
    local head = queue.peek(step, pool)
    if not head then return nil end
    local request = (launches(head) and requests.get_whole or requests.get)(step, head.id)
    local ending = fate(step, pool, head, request)
    if not ending then return head, request end
    if budget.dead == 0 then
      budget.spent = true
      return nil
    end
    budget.dead = budget.dead - 1
    end_head(step, pool, head, request, ending)
  end
end

-- Why the pool cannot launch although it can pay, as a skip reason.
local function block_reason(step, pool)
  if pool.record.paused then return "paused" end
  if rotation.at_cap(pool) then return "lane_capacity" end
  return (endpoints.block_reason(step, endpoints.get(step, pool.config.endpoint)))
end

-- Pop the head and make the lease. Returns the cost units it counts for.
local function launch(step, pool, head, request, claim)
  local units = rotation.units(step, head)
  step.group.fence = step.group.fence + 1
  request.state, request.gateway, request.dispatcher = "leased", claim.gateway, claim.dispatcher
  request.fence, request.claimed_ms, request.attempt = step.group.fence, step.now, request.attempt + 1
  request.endpoint, request.claim_nonce, request.units = pool.config.endpoint, claim.nonce, units
  request.lease_until = step.now + step.config.lease_ms
  request.skip = pools.skipped_since(pool, request) or request.skip
  queue.drop_head(step, pool, head, units)
  queue.count_out(step, pool, request.bytes)
  if request.attempt == 1 then retry.count_first(step.group, step.now) end
  request.probe_until = slots.take(step, pool, request)
  requests.lease(step, request)
  pool.record.reason, pool.record.reason_since = nil, nil
  claim.made[#claim.made + 1] = request
  return units
end

-- Serve the kept list's first pool. True if something moved.
local function serve_kept(step, claim, budget)
  local pool = rotation.first_kept(step)
  if not pool then return false end
  if pool.record.place ~= "line" or not rotation.below_minimum(step, pool) then
    rotation.turn_kept(step, pool, false)
    return true
  end
  local blocked = block_reason(step, pool)
  local head, request = live_head(step, pool, budget, function() return not blocked end)
  if budget.spent then return true end
  if not head then
    rotation.turn_kept(step, pool, false)
    rotation.leave(step, pool)
    return true
  end
  if blocked then
    rotation.turn_kept(step, pool, false)
    rotation.park(step, pool, blocked)
    return true
  end
  local units = launch(step, pool, head, request, claim)
  drr.charge_protected(pool.record, units, step.config.cost_max)
  rotation.after_launch(step, pool)
  rotation.turn_kept(step, pool, pool.record.place == "line" and rotation.below_minimum(step, pool))
  return true
end

-- Visit the pool at the front of the line.
local function visit(step, pool, claim, budget)
  local drr_policy = step.config.policy ~= "fifo"
  local blocked = block_reason(step, pool)
  local head, request = live_head(step, pool, budget, function(entry)
    return not blocked and (not drr_policy or drr.can_pay(pool.record, pool.config, rotation.units(step, entry),
      step.group.round))
  end)
  if budget.spent then return end
  if not head then
    rotation.leave(step, pool) -- even if the record says that something waits: entries can be lost
    return
  end
  if rotation.rerank(step, pool, head) then return end
  local units = rotation.units(step, head)
  -- A blocked pool opens no visit: it would gather a quantum each time the free pools go round, and those of its
  -- endpoint that can pay wait parked and get none. A visit that is open ends as any other.
  if drr_policy and (pool.record.open or not blocked) then
    drr.touch(pool.record, pool.config.quantum, step.group.round)
    if drr.visit_over(pool.record, units, pool.config.max_burst_per_visit) then
      budget.barren = budget.barren - 1
      rotation.barren_visit(step, pool, units, blocked == nil)
      return
    end
  end
  if blocked then
    rotation.park(step, pool, blocked)
    return
  end
  launch(step, pool, head, request, claim)
  if drr_policy then drr.charge(pool.record, units) end
  rotation.after_launch(step, pool)
end

--- Claim up to `want` requests for `claim` = { gateway, dispatcher, nonce }. Returns the leased requests, how long the
-- caller may sleep, and whether it should call again at once because a bound of this call was reached.
function admission.claim(step, claim, want)
  claim.made = {}
  due.run(step)
  local budget = { dead = schema.limits.dead_heads_max, barren = schema.limits.barren_visits_max }
  local blocked = false
  while #claim.made < want and budget.barren > 0 and not budget.spent do
    if step.group.in_flight >= step.config.total_concurrent_dispatch then
      blocked = true
      break
    end
    if not serve_kept(step, claim, budget) then
      local pool, lowest = rotation.first(step)
      if not pool then break end
      passes.close(step, lowest)
      visit(step, pool, claim, budget)
    end
  end
  if blocked then rotation.note_full(step) end
  leases.add(step, claim.gateway, claim.made)
  local again = want > 0 and not blocked and (budget.spent or budget.barren == 0) and #claim.made < want
  local satisfied = #claim.made == want
  wake.set_sleeping(step, claim.gateway, not satisfied and not again)
  if satisfied and next(step.group.sleepers) and step.group.in_flight < step.config.total_concurrent_dispatch
    and rotation.anyone(step) then
    wake.ring(step)
  end
  return claim.made, due.sleep_ms(step, IDLE_SLEEP_MS), again or false
end

--- The answer of a claim, appended to `answer`.
function admission.append_claim(answer, step, claimed)
  local at = #answer
  answer[at + 1], answer[at + 2], answer[at + 3] = step.now, step.config.generation, claimed.sleep_ms
  answer[at + 4], answer[at + 5], answer[at + 6] = claimed.again and 1 or 0, step.ended, chores.due_in(step)
  answer[at + 7] = #claimed.made
  return admission.append_rows(answer, claimed.made)
end

--- Leases as the flat part of an answer.
function admission.append_rows(answer, made)
  for _, request in ipairs(made) do
    local at = #answer
    answer[at + 1], answer[at + 2], answer[at + 3] = request.id, request.pool, request.producer
    answer[at + 4], answer[at + 5], answer[at + 6] = request.endpoint, request.fence, request.attempt
    answer[at + 7], answer[at + 8], answer[at + 9] = request.submitted_ms, request.claimed_ms, request.deadline_ms
    answer[at + 10], answer[at + 11], answer[at + 12] = request.lease_until, request.cost, request.bytes
    answer[at + 13], answer[at + 14], answer[at + 15] = request.nonce, request.envelope, request.body
    answer[at + 16] = request.probe_until or 0
  end
  return answer
end

return admission
