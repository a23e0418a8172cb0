--- One request: its scalars, its body, its deadline.
local keys = require("state.keys")

local requests = {}

local FIELDS = { "state", "pool", "producer", "nonce", "cost", "seq", "submitted_ms", "deadline_ms", "bytes", "attempt",
  "envelope", "gateway", "fence", "claimed_ms", "endpoint", "claim_nonce", "cancel", "ending" }

--- The request `id` as a table, or nil when there is none.
function requests.get(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id), unpack(FIELDS))
  if not found[1] then return nil end
  return {
    id = id, state = found[1], pool = found[2], producer = found[3], nonce = found[4], cost = tonumber(found[5]),
    seq = tonumber(found[6]), submitted_ms = tonumber(found[7]), deadline_ms = tonumber(found[8]),
    bytes = tonumber(found[9]), attempt = tonumber(found[10]), envelope = found[11], gateway = found[12] or "",
    fence = tonumber(found[13] or 0), claimed_ms = tonumber(found[14] or 0), endpoint = found[15] or "",
    claim_nonce = found[16] or "", cancel = found[17], ending = found[18],
  }
end

--- State, nonce and deadline of the request `id`, or nil: what a submit needs to know of an earlier one.
function requests.brief(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id), "state", "nonce", "deadline_ms")
  return found[1] and { state = found[1], nonce = found[2], deadline_ms = tonumber(found[3]) } or nil
end

--- What only a person wants to know of the request `id`.
function requests.about(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id), "model", "message_count", "dispatcher")
  return { model = found[1] or nil, message_count = tonumber(found[2] or ""), dispatcher = found[3] or nil }
end

--- State, fence and cancel mark of a lease: what a renewal needs to know.
function requests.lease_brief(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id), "state", "fence", "cancel")
  return found[1] == "leased" and { fence = tonumber(found[2]), cancel = found[3] } or nil
end

--- Store a new request, its deadline and (when it came with the call) its body. False when a body that should have been
-- stored before is not there.
function requests.admit(step, request, body)
  local body_key = keys.of(step.root, "request_body", request.id, request.nonce)
  local keep_until = request.deadline_ms + step.config.lease_ms + 60000
  if body ~= "" then
    server.call("SET", body_key, body, "PXAT", keep_until)
  elseif server.call("PEXPIREAT", body_key, keep_until) == 0 then
    return false
  end
  server.call("HSET", keys.of(step.root, "request", request.id), "state", "queued", "pool", request.pool,
    "producer", request.producer, "nonce", request.nonce, "cost", request.cost, "seq", request.seq,
    "submitted_ms", request.submitted_ms, "deadline_ms", request.deadline_ms, "bytes", request.bytes, "attempt", 0,
    "model", request.model, "message_count", request.message_count, "envelope", request.envelope)
  server.call("ZADD", keys.of(step.root, "deadlines"), request.deadline_ms, request.id)
  return true
end

--- Drop a body that was stored for a submit that is refused.
function requests.forget_body(step, id, nonce)
  server.call("UNLINK", keys.of(step.root, "request_body", id, nonce))
end

--- queued -> leased.
function requests.lease(step, request)
  server.call("HSET", keys.of(step.root, "request", request.id), "state", "leased", "gateway", request.gateway,
    "dispatcher", request.dispatcher, "fence", request.fence, "claimed_ms", request.claimed_ms,
    "endpoint", request.endpoint, "claim_nonce", request.claim_nonce, "attempt", request.attempt)
end

--- leased -> queued.
function requests.requeue(step, request)
  server.call("HSET", keys.of(step.root, "request", request.id), "state", "queued", "gateway", "", "fence", 0,
    "attempt", request.attempt)
end

--- Note that a running request should stop.
function requests.flag_cancel(step, id, actor)
  server.call("HSET", keys.of(step.root, "request", id), "cancel", actor)
end

--- Any state -> ended: nothing of it stays without an expiry. A request that still stands in a list as a tombstone
-- keeps its state until its deadline, so that whoever meets the entry can tell it from a damaged one.
function requests.finish(step, request, ending)
  local request_key = keys.of(step.root, "request", request.id)
  local keep = step.config.retention_ms
  if request.state == "queued" then keep = keep + math.max(0, request.deadline_ms - step.now) end
  server.call("HSET", request_key, "state", "ended", "ending", ending, "envelope", "")
  server.call("PEXPIRE", request_key, keep)
  server.call("ZREM", keys.of(step.root, "deadlines"), request.id)
  requests.forget_body(step, request.id, request.nonce)
end

--- The body, if it is small enough to travel with the lease; "" otherwise.
function requests.small_body(step, request, limit)
  if request.bytes > limit then return "" end
  return server.call("GET", keys.of(step.root, "request_body", request.id, request.nonce)) or ""
end

--- Ids whose deadline is before `now`, at most `limit`.
function requests.past_deadline(step, limit)
  return server.call("ZRANGE", keys.of(step.root, "deadlines"), "-inf", step.now, "BYSCORE", "LIMIT", 0, limit)
end

--- A running request is past its deadline: look again when its gateway has had a lease time to stop it.
function requests.postpone_deadline(step, request)
  server.call("ZADD", keys.of(step.root, "deadlines"), request.deadline_ms + step.config.lease_ms, request.id)
end

--- Forget the deadline of a request that is not there any more.
function requests.forget_deadline(step, id)
  server.call("ZREM", keys.of(step.root, "deadlines"), id)
end

return requests
