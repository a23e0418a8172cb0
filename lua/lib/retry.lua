--- Whether and when an attempt that failed is repeated. Pure.
--
-- Exponential backoff with full jitter (Brooker, "Exponential Backoff And Jitter"), never before the endpoint's own
-- Retry-After; and a budget for the whole group (as Finagle and gRPC have it), so that retries cannot multiply the load
-- on an endpoint that is failing: at most a share of the first attempts of the last ten seconds, with a floor.
--
-- The budget is estimated from two windows: this one, and the one before weighted by how much of it the last ten
-- seconds still overlap. The group's record has budget_start, and first attempts and retries of both windows.
local retry = {}

local WINDOW_MS = 10000

local WORDS = {
  endpoint_unreachable = "unreachable",
  endpoint_disconnected = "disconnected",
  endpoint_overloaded = "overloaded",
}

--- Whether the pool repeats this outcome: its word stands in `retry_on`. `item`: error_type, status, retryable.
function retry.wanted(item, retry_on)
  local word = item.retryable and WORDS[item.error_type]
  if not word and (item.status == "502" or item.status == "504") then word = item.status end
  if not word then return false end
  return string.find(", " .. retry_on .. ",", ", " .. word .. ",", 1, true) ~= nil
end

--- The delay before attempt `attempt` + 1. `fraction` is in 0..1; `hold_ms` is what the endpoint asked for.
function retry.delay_ms(config, attempt, fraction, hold_ms)
  local ceiling = math.min(config.retry_cap_ms, config.retry_base_ms * 2 ^ (attempt - 1))
  return math.max(hold_ms, math.floor(fraction * ceiling))
end

local function roll(group, now)
  local age = now - (group.budget_start or 0)
  if age < WINDOW_MS then return end
  local adjacent = age < 2 * WINDOW_MS
  group.budget_first_before = adjacent and group.budget_first or 0
  group.budget_retries_before = adjacent and group.budget_retries or 0
  group.budget_first, group.budget_retries = 0, 0
  group.budget_start = adjacent and group.budget_start + WINDOW_MS or now
end

--- Count a first attempt.
function retry.count_first(group, now)
  roll(group, now)
  group.budget_first = group.budget_first + 1
end

--- First attempts and retries of the last ten seconds, and how many retries the budget allows in that time.
function retry.budget(group, config, now)
  roll(group, now)
  local share = 1 - (now - group.budget_start) / WINDOW_MS
  local first = group.budget_first + group.budget_first_before * share
  local retries = group.budget_retries + group.budget_retries_before * share
  local allowed = math.max(config.retry_budget_min_per_s * WINDOW_MS / 1000, first * config.retry_budget_percent / 100)
  return first, retries, allowed
end

--- Take one retry out of the budget; false when it is spent.
function retry.spend(group, config, now)
  local _, retries, allowed = retry.budget(group, config, now)
  if retries + 1 > allowed then return false end
  group.budget_retries = group.budget_retries + 1
  return true
end

return retry
