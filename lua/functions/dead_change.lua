--- dead_change: retry or drop a request that is kept in the dead list.
-- Keys:    group root
-- Args:    action (retry: submit it anew under a new id, detached, with a fresh deadline and no attempt counted;
--          drop), request_id, actor, new_id (of the retry; "" for a drop)
-- Answers: RETRIED new_id "" "" | DROPPED "" "" "" | REFUSED reason value limit (its pool does not take a retry now: it
--          stays in the list) | UNKNOWN "" "" "" (it is not in the list)
-- Errors:  GROUP_UNKNOWN, POOL_UNKNOWN, BAD_ARGUMENT, STATE_CONFLICT
-- Moves:   none -> queued
-- Touches: group, pool, endpoint, request, request_body, dead, deadlines, requests, flow, flows, idle_flows, rotation,
--          kept, heads, waiting, events, wake
-- Flags:   allow-oom
-- Cost:    constant; a large body is renamed, not copied
-- Twice:   UNKNOWN
local dead = require("state.dead")
local events = require("state.events")
local faults = require("state.faults")
local flows = require("state.flows")
local group = require("state.group")
local intake = require("state.intake")
local names = require("lib.names")
local pools = require("state.pools")
local requests = require("state.requests")
local state = require("state.step")
local wake = require("state.wake")

-- What the dead request asked for, as a request of this moment.
local function anew(step, pool, old, new_id)
  local fairness_key = old.flow ~= flows.SHARED and old.flow or ""
  return {
    id = new_id, nonce = old.nonce, pool = old.pool, producer = old.producer, model = old.model,
    message_count = old.message_count, bytes = old.bytes, envelope = old.envelope, cost = old.cost, level = old.level,
    flow = flows.of(step, pool, fairness_key), submitted_ms = step.now, detached = true,
    deadline_ms = step.now + pool.config.default_timeout_ms,
  }
end

local function drop(step, old)
  dead.remove(step, old.id)
  requests.discard(step, old)
  return { "DROPPED", "", "", "" }
end

local function retry(step, old, new_id)
  if not names.valid(new_id) then return faults.bad_argument("new_id", new_id, names.ALLOWED) end
  if requests.get(step, new_id) then return faults.state_conflict("there is a request " .. new_id .. " already") end
  local pool = pools.get(step, old.pool)
  if not pool then return faults.pool_unknown(old.pool, group.details(step.root).pools) end
  local reason, value, limit = intake.refusal(step, pool, old.bytes)
  if reason then return { "REFUSED", reason, value, limit } end
  local new = anew(step, pool, old, new_id)
  if not requests.hand_on_body(step, old, new) then return { "REFUSED", "body_missing", 0, old.bytes } end
  dead.remove(step, old.id)
  requests.forget_content(step, old)
  intake.admit(step, pool, new)
  wake.ring(step)
  return { "RETRIED", new_id, "", "" }
end

local function run(keys, args)
  local action, id, actor, new_id = args[1], args[2], args[3], args[4] or ""
  if action ~= "retry" and action ~= "drop" then return faults.bad_argument("action", action, "retry, drop") end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local old = dead.holds(keys[1], id) and dead.find_whole(step, id)
  if not old then
    dead.remove(step, id) -- whatever stood there is gone
    return { "UNKNOWN", "", "", "" }
  end
  local answer
  if action == "drop" then answer = drop(step, old) else answer = retry(step, old, new_id) end
  if answer[1] == "DROPPED" or answer[1] == "RETRIED" then
    events.append(keys[1], step.now, "dead",
      { "action", action, "request_id", id, "pool", old.pool, "new_id", new_id, "actor", actor })
    state.save(step)
  end
  return answer
end

return { run = run }
