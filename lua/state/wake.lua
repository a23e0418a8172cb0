--- Wake tokens: they carry nothing and may be lost; behind each wait stands a bound.
local keys = require("state.keys")
local schema = require("schema")

local wake = {}

local function push(key)
  if server.call("RPUSH", key, 1) > schema.limits.wake_tokens_max then server.call("LPOP", key) end
end

--- The gateway has room and found nothing: ring when there is work. Or it has work: do not.
function wake.set_sleeping(step, gateway, sleeping)
  step.group.sleepers[gateway] = sleeping or nil
end

--- Ring one token if any gateway waits for one.
function wake.ring(step)
  if next(step.group.sleepers) then push(keys.of(step.root, "wake")) end
end

--- Ring for `count` requests that arrived together: a token each, but no more than gateways that wait.
function wake.ring_for(step, count)
  for _ in pairs(step.group.sleepers) do
    if count <= 0 then break end
    push(keys.of(step.root, "wake"))
    count = count - 1
  end
end

--- Tell one gateway to renew now. One that has died leaves no tokens behind.
function wake.ring_gateway(step, gateway)
  local key = keys.of(step.root, "wake_gateway", gateway)
  push(key)
  server.call("PEXPIRE", key, 2 * step.config.lease_ms)
end

--- Tell a producer's pump that frames arrived.
function wake.ring_producer(step, producer)
  local key = keys.of(step.root, "wake_producer", producer)
  push(key)
  server.call("PEXPIRE", key, step.config.reply_ttl_ms)
end

return wake
