--- endpoint_report: tell what a chore (probe of an endpoint, sample of its metrics) came to, if any, and take the next.
-- Keys:    group root
-- Args:    gateway, kind, endpoint, token; then for kind `next`: nothing (endpoint and token are ""); `probe`: verdict
--          (good | failure | backpressure | neutral) hold_ms error_type; `sample`: waiting token_ms ("" = unknown)
-- Answers: PROBE endpoint token until_ms chore_ms | SAMPLE endpoint token until_ms chore_ms | NONE "" 0 0 chore_ms;
--          chore_ms = until the next one is due, -1 = none
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, endpoint, waiting, pool, rotation, heads, kept, requests, returned, chores, timers, events, wake
-- Flags:   allow-oom
-- Cost:    constant: a bounded number of chores is looked at
-- Twice:   a token that is not current (any more) changes nothing; the next chore is handed out
local breaker = require("lib.breaker")
local chores = require("state.chores")
local endpoints = require("state.endpoints")
local faults = require("state.faults")
local gate = require("lib.gate")
local rotation = require("state.rotation")
local state = require("state.step")
local wake = require("state.wake")

local LOOKED_AT = 16
local TRAFFIC_MS = 500 -- a probe is left to waiting requests for as long as they may take to be launched
local SAMPLE_MS = 2000 -- longest that a sample may take
local VERDICTS = { good = true, failure = true, backpressure = true, neutral = true }

local takers = {}

-- Nobody waits for the endpoint and no probe is under way: this gateway asks it.
function takers.probe(step, endpoint, gateway)
  local record = endpoint.record
  if breaker.state(record, step.now) ~= "half_open" or not endpoint.config.probe_timeout_ms then
    if breaker.state(record, step.now) == "open" then
      chores.set(step, "probe", endpoint.name, record.open_until)
    else
      chores.clear(step, "probe", endpoint.name)
    end
    return nil
  end
  local later = breaker.probing(record, step.now) and record.probe.until_ms
    or (record.waiting > 0 or record.holder) and step.now + TRAFFIC_MS
    or step.now < (record.hold_until or 0) and record.hold_until
  if later then
    chores.set(step, "probe", endpoint.name, later)
    return nil
  end
  local token, until_ms = endpoints.begin_probe(step, endpoint, gateway)
  chores.set(step, "probe", endpoint.name, until_ms)
  return "PROBE", token, until_ms
end

function takers.sample(step, endpoint)
  if not gate.configured(endpoint.config) then
    chores.clear(step, "sample", endpoint.name)
    return nil
  end
  step.group.fence = step.group.fence + 1
  endpoint.record.sampling = step.group.fence
  chores.set(step, "sample", endpoint.name, step.now + SAMPLE_MS)
  return "SAMPLE", step.group.fence, step.now + SAMPLE_MS
end

local function take(step, gateway)
  for _, chore in ipairs(chores.due(step, LOOKED_AT)) do
    local taker = takers[chore.kind]
    if taker then
      local word, token, until_ms = taker(step, endpoints.get(step, chore.name), gateway)
      if word then return { word, chore.name, token, until_ms, chores.due_in(step) } end
    else
      chores.strike(step, chore.member) -- others wrote it: it must not hold up the chores there are
    end
  end
  return { "NONE", "", 0, 0, chores.due_in(step) }
end

local reports = {}

function reports.probe(step, endpoint, token, args)
  if not breaker.is_probe(endpoint.record, "", token) then return end
  endpoints.note(step, endpoint, "", token,
    { verdict = args[5], hold_ms = tonumber(args[6]) or 0, error_type = args[7], gateway = args[1] })
end

function reports.sample(step, endpoint, token, args)
  if endpoint.record.sampling ~= token then return end
  endpoint.record.sampling = nil
  endpoints.sampled(step, endpoint, args[1], tonumber(args[5]), tonumber(args[6]))
  chores.set(step, "sample", endpoint.name, step.now + (endpoint.config.gate_poll_ms or SAMPLE_MS))
end

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local gateway, kind = args[1], args[2]
  local report = reports[kind]
  if not report and kind ~= "next" then return faults.bad_argument("kind", kind, "next, probe, sample") end
  if kind == "probe" and not VERDICTS[args[5] or ""] then
    return faults.bad_argument("verdict", args[5], "good, failure, backpressure, neutral")
  end
  if report then
    local endpoint = endpoints.get(step, args[3])
    report(step, endpoint, tonumber(args[4]), args)
    rotation.use_room(step, endpoint)
    if rotation.anyone(step) then wake.ring(step) end
  end
  local answer = take(step, gateway)
  state.save(step)
  return answer
end

return { run = run }
