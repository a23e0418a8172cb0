--- Passes: barren visits, one after the other. When they have gone once round, the rounds that nobody could have used
-- are added at once ("virtual rounds", lib/drr.lua). The group's record has pass_limit (absent = none is under way),
-- pass_visits (the fewest visits that a launchable pool needs) and pass_held (endpoints that held up a pool).
local drr = require("lib.drr")
local endpoints = require("state.endpoints")

local passes = {}

--- What was launched, parked, or came back makes another pass of it.
function passes.restart(step)
  step.group.pass_limit, step.group.pass_visits, step.group.pass_held = nil, nil, nil
end

--- A pool that joins is asked, too.
function passes.extend(step)
  if step.group.pass_limit then step.group.pass_limit = step.group.turn end
end

--- A visit launched nothing because of credit alone. `launchable`: nothing else holds the pool up.
function passes.note_barren(step, pool, head_cost, launchable)
  local group = step.group
  if not group.pass_limit then group.pass_limit, group.pass_visits = group.turn, nil end
  if launchable then
    local visits = drr.visits_needed(pool.record, head_cost, pool.config.quantum)
    group.pass_visits = math.min(group.pass_visits or visits, visits)
  elseif endpoints.block_reason(step, endpoints.get(step, pool.config.endpoint)) then
    group.pass_held = group.pass_held or {}
    group.pass_held[pool.config.endpoint] = true
  end
end

-- Whether an endpoint that held up a pool in this pass does not any more, for whatever reason: time, a probe, a sample.
local function somebody_was_freed(step)
  for name in pairs(step.group.pass_held or {}) do
    if not endpoints.block_reason(step, endpoints.get(step, name)) then return true end
  end
  return false
end

--- The pass is over when the lowest turn was given out after it began: add one round less than the fewest visits that
-- any launchable pool needs. It counts for nothing if a pool that it did not ask, because its endpoint was blocked,
-- could launch by now: another pass asks that one, too.
function passes.close(step, lowest_turn)
  local group = step.group
  if not group.pass_limit or lowest_turn < group.pass_limit then return end
  if group.pass_visits and not somebody_was_freed(step) then group.round = group.round + group.pass_visits - 1 end
  passes.restart(step)
end

return passes
