--- pool_estimate: how long a request that is submitted to the pool now would wait.
-- Keys:    group root
-- Args:    pool
-- Answers: pending delayed in_flight per_second (as text, "" = unknown) wait_ms (-1 = unknown) reason (why the pool
--          waits now, or why it would refuse, "" = neither)
-- Errors:  GROUP_UNKNOWN, POOL_UNKNOWN
-- Moves:   (none)
-- Touches: group, pool, endpoint
-- Flags:   no-writes
-- Cost:    constant
-- Twice:   reads again
local drain = require("lib.drain")
local endpoints = require("state.endpoints")
local faults = require("state.faults")
local group = require("state.group")
local intake = require("state.intake")
local pools = require("state.pools")
local rotation = require("state.rotation")
local state = require("state.step")

-- Whether a request would be launched at once if a gateway has a slot.
local function is_free(step, pool)
  return pool.record.depth == 0 and not pool.record.paused and not rotation.at_cap(pool)
    and step.group.in_flight < step.config.total_concurrent_dispatch
    and not endpoints.block_reason(step, endpoints.get(step, pool.config.endpoint))
end

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local pool = pools.get(step, args[1] or "")
  if not pool then return faults.pool_unknown(args[1], group.details(keys[1]).pools) end
  local record = pool.record
  local rate = drain.per_second(record, step.now)
  local wait_ms = is_free(step, pool) and 0 or drain.wait_ms(record, record.depth + 1, step.now)
  if record.paused then wait_ms = nil end
  local reason = intake.refusal(step, pool, 0) or (record.depth > 0 and record.reason)
  return { record.depth, record.delayed or 0, record.in_flight, rate and string.format("%.3f", rate) or "",
    wait_ms or -1, reason or "" }
end

return { run = run }
