--- Replies that are kept: of requests with an idempotency key (a repeat gets the same reply), and of detached ones
-- (they are fetched by id). The key of an idempotency key says which request it stands for.
local keys = require("state.keys")

local results = {}

--- The request that an idempotency key stands for, as { id, fingerprint }, or nil.
function results.find(step, hash)
  local stored = server.call("GET", keys.of(step.root, "idempotency", hash))
  return stored and cmsgpack.unpack(stored) or nil
end

--- The key stands for this request from now on, until its reply has been kept for as long as the group says.
function results.claim(step, request)
  local keep_ms = request.deadline_ms - step.now + 2 * step.config.lease_ms + step.config.idempotency_ttl_ms
  server.call("SET", keys.of(step.root, "idempotency", request.idempotency),
    cmsgpack.pack({ id = request.id, fingerprint = request.fingerprint }), "PX", keep_ms)
end

--- The terminal frame that is kept for the request, or nil.
function results.frame(step, id)
  return server.call("GET", keys.of(step.root, "result", id)) or nil
end

--- Whether the request's reply is to be kept. One with an idempotency key that no attempt was made at has none.
function results.wanted(request)
  return request.detached or (request.idempotency ~= nil and request.attempt > 0)
end

--- Keep the terminal frame.
function results.keep(step, request, frame)
  local ttl_ms = step.config.idempotency_ttl_ms
  server.call("SET", keys.of(step.root, "result", request.id), frame, "PX", ttl_ms)
  if request.idempotency then
    server.call("PEXPIRE", keys.of(step.root, "idempotency", request.idempotency), ttl_ms)
  end
end

--- The request ended without having run: a repeat is as good as the first.
function results.release(step, request)
  server.call("DEL", keys.of(step.root, "idempotency", request.idempotency))
end

return results
