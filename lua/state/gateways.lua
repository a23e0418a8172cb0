--- The registry of gateways: who lives, since when, with how many slots. An entry without heartbeats expires.
local keys = require("state.keys")

local gateways = {}

--- Register or refresh a gateway. `about` holds host, pid, version, slots, started_ms, draining.
function gateways.beat(step, name, about)
  local key = keys.of(step.root, "gateway", name)
  server.call("HSET", key, "host", about.host, "pid", about.pid, "version", about.version, "slots", about.slots,
    "started_ms", about.started_ms, "draining", about.draining, "beat_ms", step.now)
  server.call("PEXPIRE", key, 2 * step.config.lease_ms)
  server.call("SADD", keys.of(step.root, "gateways"), name)
end

--- The gateway has stopped in good order.
function gateways.leave(step, name)
  server.call("DEL", keys.of(step.root, "gateway", name))
  server.call("SREM", keys.of(step.root, "gateways"), name)
  step.group.sleepers[name] = nil
end

--- Forget gateways whose entry has expired: they no longer wait for wake tokens. What they held goes as it is reaped;
-- ids that nobody knows any more go with time. At most `limit` are looked at.
function gateways.forget_expired(step, limit)
  for at, name in ipairs(server.call("SMEMBERS", keys.of(step.root, "gateways"))) do
    if at > limit then break end
    if server.call("EXISTS", keys.of(step.root, "gateway", name)) == 0 then
      server.call("SREM", keys.of(step.root, "gateways"), name)
      server.call("PEXPIRE", keys.of(step.root, "holding", name), 10 * step.config.lease_ms)
      step.group.sleepers[name] = nil
    end
  end
end

--- Names of all registered gateways, and one's entry as a flat list of fields.
function gateways.names(root)
  local names = server.call("SMEMBERS", keys.of(root, "gateways"))
  table.sort(names)
  return names
end

function gateways.entry(root, name)
  local flat = server.call("HGETALL", keys.of(root, "gateway", name))
  if #flat == 0 then return nil end
  local found = {}
  for at = 1, #flat, 2 do found[flat[at]] = flat[at + 1] end
  return found
end

--- What is told of the gateways: a text that changes when one comes, goes, or begins to drain, and how many live.
function gateways.signs(root)
  local parts, live = {}, 0
  for at, name in ipairs(gateways.names(root)) do
    local found = server.call("HMGET", keys.of(root, "gateway", name), "draining", "slots")
    if found[2] then live = live + 1 end
    parts[at] = name .. (found[2] and ":" .. found[2] .. ":" .. (found[1] or "") or ":gone")
  end
  return table.concat(parts, " "), live
end

--- How many leases the gateway holds.
function gateways.held(root, name)
  return server.call("SCARD", keys.of(root, "holding", name))
end

return gateways
