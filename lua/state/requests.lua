--- One request: its facts, its lease, its body, its deadline.
--
-- The hash holds `state` and `ending` in words, and packed: `facts` (what never changes: pool, producer, nonce, cost, seq,
-- submitted_ms, deadline_ms, bytes, model, message_count) and `lease` (gateway, dispatcher, fence, claimed_ms, endpoint,
-- claim_nonce, attempt of the last claim). A small body stands in the hash as well, a large one under its own key.
local keys = require("state.keys")
local schema = require("schema")

local requests = {}

local NO_LEASE = { gateway = "", dispatcher = "", fence = 0, claimed_ms = 0, endpoint = "", claim_nonce = "", attempt = 0 }

--- The request `id` as one table of facts, lease, state, envelope, body, cancel and ending, or nil when there is none.
-- `body` is "" unless it is small.
function requests.get(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id),
    "state", "facts", "lease", "envelope", "body", "cancel", "ending")
  if not found[1] or not found[2] then return nil end
  local request = cmsgpack.unpack(found[2])
  for name, value in pairs(found[3] and cmsgpack.unpack(found[3]) or NO_LEASE) do request[name] = value end
  request.id, request.state, request.envelope, request.body = id, found[1], found[4], found[5] or ""
  request.cancel, request.ending = found[6], found[7]
  return request
end

--- State, nonce and deadline of the request `id`, or nil: what a submit needs to know of an earlier one.
function requests.brief(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id), "state", "facts")
  if not found[1] or not found[2] then return nil end
  local facts = cmsgpack.unpack(found[2])
  return { state = found[1], nonce = facts.nonce, deadline_ms = facts.deadline_ms }
end

--- State, fence and cancel mark of a lease: what a renewal needs to know.
function requests.lease_brief(step, id)
  local found = server.call("HMGET", keys.of(step.root, "request", id), "state", "lease", "cancel")
  return found[1] == "leased" and { fence = cmsgpack.unpack(found[2]).fence, cancel = found[3] } or nil
end

local function is_small(bytes)
  return bytes <= schema.limits.inline_body_bytes
end

--- Store a new request and its deadline. False when a body that should have been stored before is not there.
function requests.admit(step, request, body)
  local facts = cmsgpack.pack({ pool = request.pool, producer = request.producer, nonce = request.nonce,
    cost = request.cost, seq = request.seq, submitted_ms = request.submitted_ms, deadline_ms = request.deadline_ms,
    bytes = request.bytes, model = request.model, message_count = request.message_count })
  local request_key = keys.of(step.root, "request", request.id)
  if is_small(request.bytes) then
    if #body ~= request.bytes then return false end
    server.call("HSET", request_key, "state", "queued", "facts", facts, "envelope", request.envelope, "body", body)
  else
    local keep_until = request.deadline_ms + step.config.lease_ms + 60000
    local body_key = keys.of(step.root, "request_body", request.id, request.nonce)
    if server.call("PEXPIREAT", body_key, keep_until) == 0 then return false end
    server.call("HSET", request_key, "state", "queued", "facts", facts, "envelope", request.envelope)
  end
  server.call("ZADD", keys.of(step.root, "deadlines"), request.deadline_ms, request.id)
  return true
end

--- Drop a body that was stored under its own key; a small one is part of the request.
function requests.forget_body(step, id, nonce, bytes)
  if not is_small(bytes) then server.call("UNLINK", keys.of(step.root, "request_body", id, nonce)) end
end

local function write_lease(step, request, state)
  server.call("HSET", keys.of(step.root, "request", request.id), "state", state, "lease", cmsgpack.pack({
    gateway = request.gateway, dispatcher = request.dispatcher, fence = request.fence, claimed_ms = request.claimed_ms,
    endpoint = request.endpoint, claim_nonce = request.claim_nonce, attempt = request.attempt }))
end

--- queued -> leased.
function requests.lease(step, request)
  write_lease(step, request, "leased")
end

--- leased -> queued. Keeps the attempt.
function requests.requeue(step, request)
  request.gateway, request.dispatcher, request.fence, request.claim_nonce = "", "", 0, ""
  write_lease(step, request, "queued")
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
  server.call("HSET", request_key, "state", "ended", "ending", ending, "envelope", "", "body", "")
  server.call("PEXPIRE", request_key, keep)
  step.finished = step.finished or {}
  step.finished[#step.finished + 1] = request.id
  requests.forget_body(step, request.id, request.nonce, request.bytes)
end

--- Forget the deadlines of the requests that ended in this step. One write for all.
function requests.save(step)
  if not step.finished then return end
  server.call("ZREM", keys.of(step.root, "deadlines"), unpack(step.finished))
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
