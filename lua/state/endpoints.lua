--- Endpoint records: slots, breaker, hold and gate, and the pools that are parked on an endpoint.
--
-- Of the pools that wait for one endpoint, the lowest turn comes back alone (`holder`); when its turn is over, the
-- next. Bringing all back at once starves, one by one to the tail turns 4:1 into 1:1 (see lua/README.md).
local breaker = require("lib.breaker")
local chores = require("state.chores")
local events = require("state.events")
local gate = require("lib.gate")
local keys = require("state.keys")
local packed = require("state.packed")
local records = require("records")
local timers = require("state.timers")

local FIELDS = require("lib.config").FIELDS.endpoints

local endpoints = {}

-- A gateway that could not ask, or learnt nothing, does not ask again in the same instant.
local ASK_AGAIN_MS = 1000

function endpoints.new_record()
  -- Absent when unset: holder, last_error, last_error_ms, timer_at, polled, sampling, and those of lib/breaker.lua and
  -- lib/gate.lua.
  return { in_flight = 0, waiting = 0, attempts = 0, failures = 0 }
end

--- The endpoint `name` as { name, config, record }; one that is not configured (any more) counts but limits nothing.
function endpoints.get(step, name)
  local endpoint = step.endpoints[name]
  if endpoint then return endpoint end
  local found = server.call("HMGET", keys.of(step.root, "endpoint", name), "config", "record")
  endpoint = {
    name = name,
    config = found[1] and packed.read_config(found[1], FIELDS) or {},
    record = packed.read_record(found[2], records.map) or endpoints.new_record(),
  }
  step.endpoints[name] = endpoint
  return endpoint
end

function endpoints.save(step)
  for name, endpoint in pairs(step.endpoints) do
    local key, record = keys.of(step.root, "endpoint", name), cmsgpack.pack(endpoint.record)
    if endpoint.config_text then
      server.call("HSET", key, "config", endpoint.config_text, "record", record)
    else
      server.call("HSET", key, "record", record)
    end
  end
end

--- Give an endpoint a config (empty: it is left out), `text` in JSON, to be written with its record, and have done what
-- it asks for.
function endpoints.configure(step, endpoint, config, text)
  step.endpoints[endpoint.name] = endpoint
  endpoint.config, endpoint.config_text = config, text
  packed.remember(text, config)
  endpoint.record.gate, endpoint.record.sampling = nil, nil -- what the engine says under another config does not count
  if gate.configured(endpoint.config) then
    chores.set(step, "sample", endpoint.name, step.now)
    endpoint.record.polled = true
  elseif endpoint.record.polled then
    chores.clear(step, "sample", endpoint.name)
    endpoint.record.polled = nil
  end
  if not endpoint.config.probe_timeout_ms then -- it is left out: nothing is to be done for it
    chores.clear(step, "probe", endpoint.name)
    timers.clear(step, "endpoint:" .. endpoint.name)
    endpoint.record.timer_at = nil
  elseif endpoint.record.breaker then -- it may have been left out for a while
    chores.set(step, "probe", endpoint.name, math.max(step.now, endpoint.record.open_until or 0))
  end
end

function endpoints.remove(step, name)
  step.endpoints[name] = nil
  server.call("DEL", keys.of(step.root, "endpoint", name), keys.of(step.root, "waiting", name))
  chores.clear(step, "probe", name)
  timers.clear(step, "endpoint:" .. name)
end

--- Why nothing may be launched on this endpoint now, as a skip reason, and until when by time alone (nil = something
-- must happen first). Nil when something may.
function endpoints.block_reason(step, endpoint)
  local record, config = endpoint.record, endpoint.config
  local blocked_until = breaker.blocked_until(record, step.now)
  if blocked_until then return "endpoint_open", blocked_until end
  if record.hold_until and step.now < record.hold_until then return "endpoint_gated", record.hold_until end
  if gate.blocks(record, config, step.now) then return "endpoint_gated", gate.blocked_until(record, config) end
  if config.max_concurrent and record.in_flight >= config.max_concurrent then return "endpoint_capacity" end
  return nil
end

--- Pools wait for an endpoint that is blocked until `at`: look again then.
function endpoints.look_again(step, endpoint, at)
  if endpoint.record.timer_at == at then return end
  endpoint.record.timer_at = at
  timers.set(step, "endpoint:" .. endpoint.name, at)
end

local function tell(step, endpoint, from, to, about)
  events.append(step.root, step.now, "breaker",
    { "endpoint", endpoint.name, "from", from, "to", to, "reason", about.reason or "", "gateway", about.gateway or "" })
end

local function begin_probe(step, endpoint, probe)
  if breaker.begin_probe(endpoint.record, probe) then
    tell(step, endpoint, "open", "half_open", { reason = "open_ms passed", gateway = probe.gateway })
  end
end

--- A request is launched. Returns until when it must have ended if it is the probe of a half-open breaker, else nil.
function endpoints.launched(step, endpoint, request)
  local record = endpoint.record
  record.in_flight, record.attempts = record.in_flight + 1, record.attempts + 1
  if record.gate then record.gate.launched = record.gate.launched + 1 end
  local timeout_ms = endpoint.config.probe_timeout_ms
  if not record.breaker or not timeout_ms then return nil end
  local until_ms = math.min(step.now + timeout_ms, request.deadline_ms)
  begin_probe(step, endpoint, { id = request.id, fence = request.fence, gateway = request.gateway, since = step.now,
    until_ms = until_ms })
  return until_ms
end

--- Hand a probe that is no request to a gateway. Returns its token and until when it must have ended.
function endpoints.begin_probe(step, endpoint, gateway)
  step.group.fence = step.group.fence + 1
  local until_ms = step.now + endpoint.config.probe_timeout_ms
  begin_probe(step, endpoint, { id = "", fence = step.group.fence, gateway = gateway, since = step.now,
    until_ms = until_ms })
  return step.group.fence, until_ms
end

--- Take in what a run or a probe (`id` "") says of the endpoint: `about` has verdict, hold_ms, error_type, gateway. Any
-- other verdict than good and failure frees a probe and says nothing.
function endpoints.note(step, endpoint, id, fence, about)
  local record = endpoint.record
  if about.verdict == "failure" then
    record.failures = record.failures + 1
    record.last_error, record.last_error_ms = about.error_type, step.now
  elseif about.verdict == "backpressure" then
    local hold_until = step.now + math.min(about.hold_ms, step.config.hold_max_ms)
    if hold_until > (record.hold_until or 0) then
      if step.now >= (record.hold_until or 0) then
        tell(step, endpoint, "free", "held", { reason = about.error_type, gateway = about.gateway })
      end
      record.hold_until = hold_until
    end
  end
  local probe = breaker.is_probe(record, id, fence)
  if not probe and record.breaker then return end
  local from = breaker.state(record, step.now)
  local to = breaker.note(record, endpoint.config, about.verdict, probe, step.now)
  if to == "open" then
    chores.set(step, "probe", endpoint.name, record.open_until)
  elseif to == "closed" then
    chores.clear(step, "probe", endpoint.name)
  elseif probe and endpoint.config.probe_timeout_ms then -- not of one that was left out of the config
    local pause = id == "" and about.verdict == "neutral" and ASK_AGAIN_MS or 0
    chores.set(step, "probe", endpoint.name, math.max(step.now + pause, record.hold_until or 0))
  end
  if to then tell(step, endpoint, from, to, { reason = about.error_type, gateway = about.gateway }) end
end

--- Take in a sample of the engine's metrics; what is nil is unknown. Without any the last one stays, and grows old.
function endpoints.sampled(step, endpoint, gateway, waiting, token_ms)
  if waiting or token_ms then
    endpoint.record.gate = { waiting = waiting, token_ms = token_ms, at = step.now, launched = 0, gateway = gateway }
  end
end

--- Put a pool among those that wait for this endpoint.
function endpoints.park(step, endpoint, pool, rank)
  server.call("ZADD", keys.of(step.root, "waiting", endpoint.name), rank, pool.name)
  endpoint.record.waiting = endpoint.record.waiting + 1
end

--- Take the pool `name` out of the waiting ones. True if it stood there.
function endpoints.unpark(step, endpoint, name)
  if endpoint.record.waiting == 0 then return false end
  local removed = server.call("ZREM", keys.of(step.root, "waiting", endpoint.name), name)
  endpoint.record.waiting = endpoint.record.waiting - removed
  return removed == 1
end

--- Names of the pools that wait, lowest turn first.
function endpoints.waiting(step, endpoint, count)
  if endpoint.record.waiting == 0 then return {} end
  return server.call("ZRANGE", keys.of(step.root, "waiting", endpoint.name), 0, count - 1)
end

return endpoints
