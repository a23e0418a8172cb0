--- pool_pause: pause, resume or drain a pool.
-- Keys:    group root
-- Args:    pool, action (pause: nothing launches, submits are taken; drain: what waits is launched, nothing new is
--          taken; resume: ends both), actor, reason
-- Answers: APPLIED state waiting in_flight | UNCHANGED state waiting in_flight (state is active, paused or draining)
-- Errors:  GROUP_UNKNOWN, POOL_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, pool, endpoint, rotation, heads, kept, waiting, requests, flow, flows, returned,
--          events, wake, timers
-- Flags:   allow-oom
-- Cost:    constant
-- Twice:   UNCHANGED
local events = require("state.events")
local faults = require("state.faults")
local group = require("state.group")
local pools = require("state.pools")
local rotation = require("state.rotation")
local state = require("state.step")
local wake = require("state.wake")

local STATES = { pause = "paused", resume = "active", drain = "draining" }

local function state_of(record)
  return record.paused and "paused" or record.draining and "draining" or "active"
end

local function run(keys, args)
  local name, action, actor, reason = args[1], args[2], args[3], args[4] or ""
  if not STATES[action] then return faults.bad_argument("action", action, "pause, resume, drain") end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local pool = pools.get(step, name)
  if not pool then return faults.pool_unknown(name, group.details(keys[1]).pools) end
  local record = pool.record
  local word = "UNCHANGED"
  if state_of(record) ~= STATES[action] then
    word = "APPLIED"
    local note = { by = actor, at_ms = step.now, reason = reason }
    record.paused = action == "pause" and note or nil
    record.draining = action == "drain" and note or nil
    if action == "pause" then
      rotation.pause(step, pool)
    else
      rotation.resume(step, pool)
      wake.ring(step)
    end
    events.append(keys[1], step.now, action, { "pool", name, "actor", actor, "reason", reason })
  end
  local answer = { word, state_of(record), record.depth, record.in_flight }
  state.save(step)
  return answer
end

return { run = run }
