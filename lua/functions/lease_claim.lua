--- lease_claim: admit up to `want` waiting requests: peek, check, pop.
-- Keys:    group root
-- Args:    gateway, dispatcher, nonce, want
-- Answers: server_ms generation sleep_ms again(0|1) ended chore_ms (until a chore is due, -1 = none) lease_count, then
--          per lease: request_id pool producer endpoint fence attempt submitted_ms claimed_ms deadline_ms
--          lease_until_ms cost body_bytes nonce envelope body probe_until_ms (0 = no probe of a breaker)
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   queued -> leased, queued -> ended, delayed -> queued
-- Touches: group, pool, request, request_body, requests, flow, flows, idle_flows, returned, rotation, kept, heads,
--          deadlines, endpoint, waiting, leases, holding, answer, alive, replies, wake_producer, endings, wake,
--          timers, events, idempotency, result
-- Flags:   allow-oom
-- Cost:    linear in want, plus a bounded number of dead heads and barren visits; any number of pools
-- Twice:   same nonce: those of the same leases that are still current
local admission = require("state.admission")
local answers = require("state.answers")
local faults = require("state.faults")
local schema = require("schema")
local state = require("state.step")

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local claim, want = { gateway = args[1], dispatcher = args[2], nonce = args[3] }, tonumber(args[4])
  if not want or want < 0 or want > schema.limits.claim_max then
    return faults.bad_argument("want", args[4], "0 to " .. schema.limits.claim_max)
  end
  local words, made = answers.recall(step, claim.gateway, claim.nonce)
  if words then
    return admission.append_claim({}, step, { made = made, sleep_ms = 0, again = true })
  end
  local sleep_ms, again
  made, sleep_ms, again = admission.claim(step, claim, want)
  if #made > 0 then answers.remember(step, claim.gateway, claim.nonce, {}, made) end
  state.save(step)
  return admission.append_claim({}, step, { made = made, sleep_ms = sleep_ms, again = again })
end

return { run = run }
