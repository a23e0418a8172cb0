--- Whether a producer lives, and who it is. Judged in the same step that acts on it.
local keys = require("state.keys")

local producers = {}

--- Note that the producer lives, for `ttl_ms`.
function producers.refresh(step, producer, session, ttl_ms)
  server.call("SET", keys.of(step.root, "alive", producer), session, "PX", ttl_ms)
end

--- The session that owns the producer, or false.
function producers.session(root, producer)
  return server.call("GET", keys.of(root, "alive", producer))
end

--- Time between two heartbeats of a gateway, ms: a third of what runs out first without them.
function producers.beat_ms(config)
  return math.min(config.lease_ms, config.liveness_ms) / 3
end

--- Whether gateways heard from each other lately. After an outage everybody's markers have run out while nobody could
-- renew them: for one liveness TTL nothing is taken for gone and no lease is reaped.
function producers.in_grace(step)
  local group = step.group
  local interval = producers.beat_ms(step.config)
  if group.last_beat > 0 and step.now - group.last_beat > 2 * interval and step.now >= group.grace_until then
    group.grace_until = step.now + step.config.liveness_ms
    group.last_beat = step.now
  end
  return step.now < group.grace_until
end

--- Whether replies can reach the producer. Asked once a step for each.
function producers.alive(step, producer)
  step.alive = step.alive or {}
  local known = step.alive[producer]
  if known == nil then
    known = server.call("EXISTS", keys.of(step.root, "alive", producer)) == 1 or producers.in_grace(step)
    step.alive[producer] = known
  end
  return known
end

--- Whether somebody will take the request's reply: its producer, or whoever fetches it later.
function producers.reachable(step, request)
  return request.detached or producers.alive(step, request.producer)
end

return producers
