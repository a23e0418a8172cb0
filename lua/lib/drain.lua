--- How fast a pool drains: launches a second, estimated from two windows. Pure.
--
-- The older window is weighted by how much of it the last half minute still overlaps. A pool's record has drain_start,
-- drain_count (this window) and drain_before (the one before; absent = there was none, so less time was observed).
local drain = {}

local WINDOW_MS = 30000
local LEAST_MS = 1000 -- no rate is made of less
local RETRY_MIN_MS, RETRY_MAX_MS = 1000, 30000
local SHARE = 20 -- a refused caller may come back when a twentieth of the bound has drained

local function roll(record, now)
  local age = now - (record.drain_start or now)
  if not record.drain_start or age >= 2 * WINDOW_MS then
    record.drain_start, record.drain_count, record.drain_before = now, 0, nil
  elseif age >= WINDOW_MS then
    record.drain_start, record.drain_before = record.drain_start + WINDOW_MS, record.drain_count
    record.drain_count = 0
  end
end

--- A request of the pool was launched.
function drain.count(record, now)
  roll(record, now)
  record.drain_count = record.drain_count + 1
end

--- Launches a second, nil = unknown: nothing was launched lately.
function drain.per_second(record, now)
  roll(record, now)
  local age = now - record.drain_start
  local launches, observed_ms = record.drain_count, math.max(LEAST_MS, age)
  if record.drain_before then
    launches, observed_ms = launches + record.drain_before * (1 - age / WINDOW_MS), WINDOW_MS
  end
  if launches < 1 then return nil end
  return launches * 1000 / observed_ms
end

--- How long a request that arrives now will wait behind `ahead` others, ms; nil = unknown.
function drain.wait_ms(record, ahead, now)
  local rate = drain.per_second(record, now)
  return rate and math.ceil(ahead * 1000 / rate)
end

--- When a caller that was refused because of a bound of `limit` may come back, ms; nil = unknown.
function drain.retry_after_ms(record, limit, now)
  local wait_ms = drain.wait_ms(record, math.max(1, limit / SHARE), now)
  return wait_ms and math.min(RETRY_MAX_MS, math.max(RETRY_MIN_MS, wait_ms))
end

return drain
