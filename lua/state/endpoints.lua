--- Endpoint records, and the pools that are parked on an endpoint.
--
-- Of the pools that wait for one endpoint, the lowest turn comes back alone (`holder`); when its turn is over, the
-- next. Bringing all back at once starves, one by one to the tail turns 4:1 into 1:1 (see lua/README.md).
local keys = require("state.keys")
local packed = require("state.packed")

local endpoints = {}

function endpoints.new_record()
  -- Absent when unset: holder, last_error, last_error_ms.
  return { in_flight = 0, waiting = 0, attempts = 0, failures = 0 }
end

--- The endpoint `name` as { name, config, record }; one that is not configured (any more) counts but limits nothing.
function endpoints.get(step, name)
  local endpoint = step.endpoints[name]
  if endpoint then return endpoint end
  local found = server.call("HMGET", keys.of(step.root, "endpoint", name), "config", "record")
  endpoint = {
    name = name,
    config = found[1] and packed.read_config(found[1]) or {},
    record = packed.read_record(found[2]) or endpoints.new_record(),
  }
  step.endpoints[name] = endpoint
  return endpoint
end

function endpoints.save(step)
  for name, endpoint in pairs(step.endpoints) do
    server.call("HSET", keys.of(step.root, "endpoint", name), "record", cmsgpack.pack(endpoint.record))
  end
end

function endpoints.configure(step, endpoint)
  step.endpoints[endpoint.name] = endpoint
  server.call("HSET", keys.of(step.root, "endpoint", endpoint.name), "config", cmsgpack.pack(endpoint.config))
end

function endpoints.remove(step, name)
  step.endpoints[name] = nil
  server.call("DEL", keys.of(step.root, "endpoint", name), keys.of(step.root, "waiting", name))
end

--- Why nothing may be launched on this endpoint now, as a skip reason, or nil.
function endpoints.block_reason(endpoint)
  local limit = endpoint.config.max_concurrent
  if limit and endpoint.record.in_flight >= limit then return "endpoint_capacity" end
  return nil
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
