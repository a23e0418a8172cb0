--- One request: its record, its body, its deadline.
--
-- The hash holds `state` and `ending` in words, `record` packed (pool, producer, nonce, cost, seq, submitted_ms,
-- deadline_ms, bytes, model, message_count, flow, level, idempotency, detached; from the last claim: gateway,
-- dispatcher, fence, claimed_ms, endpoint, claim_nonce, attempt, units, probe_until, skip (why it was not launched
-- sooner); earlier `tries`; due_ms of a retry), the producer's `envelope`, `body` if it is small (a large one has its
-- own key), and of a stream that began `stream`: chunks|bytes|first_ms.
local keys = require("state.keys")
local packed = require("state.packed")
local schema = require("schema")

local layout = require("records").request

local requests = {}

-- One that cannot be read is as good as none: it must not stop the call that meets it, which serves others, too.
local function unpack_request(id, found)
  if not found[1] or not found[2] then return nil end
  local request = packed.read_record(found[2], layout.decode)
  if not request or not request.pool or not request.seq then return nil end
  request.id, request.state, request.envelope, request.cancel = id, found[1], found[3], found[4]
  request.ending, request.stream, request.body = found[5], found[6], found[7]
  return request
end

--- The request `id` as one table, or nil when there is none. Without its body.
function requests.get(step, id)
  return unpack_request(id, server.call("HMGET", keys.of(step.root, "request", id),
    "state", "record", "envelope", "cancel", "ending", "stream"))
end

--- The request `id` with its body ("" when it has its own key), to be leased or leased already.
function requests.get_whole(step, id)
  local request = unpack_request(id, server.call("HMGET", keys.of(step.root, "request", id),
    "state", "record", "envelope", "cancel", "ending", "stream", "body"))
  if request then request.body = request.body or "" end
  return request
end

--- Whether the request `id` waits for its next attempt. Reads one word.
function requests.is_delayed(step, id)
  return server.call("HGET", keys.of(step.root, "request", id), "state") == "delayed"
end

local function is_small(bytes)
  return bytes <= schema.limits.inline_body_bytes
end

--- Whether a small body is there in full. (A large one is read by the gateway, which notices.)
function requests.body_is_whole(request)
  return not is_small(request.bytes) or #request.body == request.bytes
end

--- Until when the request may wait for its first attempt.
function requests.waits_until(request)
  return request.queue_until or request.deadline_ms
end

--- What a request is told that waited as long as its caller allowed, before its deadline; nil for any other.
function requests.waited_out(step, request)
  if not request.queue_until or step.now >= request.deadline_ms then return nil end
  return { error_type = "max_wait_exceeded", error_message = "the request waited as long as its caller allowed" }
end

-- What its record says. Few have what has no place of its own there (schema.toml).
local function encode(request)
  local rest = {}
  if request.idempotency or request.detached or request.tries or request.skip then
    rest = { idempotency = request.idempotency, detached = request.detached, tries = request.tries,
      skip = request.skip }
  end
  return layout.encode(request, rest)
end

--- Store a new request and its deadline. False when a body that should have been stored before is not there.
function requests.admit(step, request)
  request.attempt, request.fence, request.gateway, request.endpoint = 0, 0, "", ""
  local record = encode(request)
  local request_key = keys.of(step.root, "request", request.id)
  if is_small(request.bytes) then
    if #request.body ~= request.bytes then return false end
    server.call("HSET", request_key, "state", "queued", "record", record, "envelope", request.envelope,
      "body", request.body)
  else
    local keep_until = request.deadline_ms + step.config.lease_ms + 60000
    local body_key = keys.of(step.root, "request_body", request.id, request.nonce)
    if server.call("PEXPIREAT", body_key, keep_until) == 0 then return false end
    server.call("HSET", request_key, "state", "queued", "record", record, "envelope", request.envelope)
  end
  server.call("ZADD", keys.of(step.root, "deadlines"), requests.waits_until(request), request.id)
  return true
end

--- Remove the body of a submit that is not admitted: it is gone when the producer gets the answer.
function requests.refuse_body(step, id, nonce, bytes)
  if not is_small(bytes) then server.call("UNLINK", keys.of(step.root, "request_body", id, nonce)) end
end

--- Drop a body that was stored under its own key; a small one is part of the request. It expires at once: the server
-- would free a megabyte within this call (UNLINK, too, as a string is one allocation).
function requests.forget_body(step, id, nonce, bytes)
  if not is_small(bytes) then server.call("PEXPIRE", keys.of(step.root, "request_body", id, nonce), 1) end
end

local function write(step, request, state)
  server.call("HSET", keys.of(step.root, "request", request.id), "state", state, "record", encode(request))
end

--- queued -> leased.
function requests.lease(step, request)
  if request.queue_until then -- it has waited; from now on its deadline counts
    request.queue_until = nil
    server.call("ZADD", keys.of(step.root, "deadlines"), request.deadline_ms, request.id)
  end
  write(step, request, "leased")
end

local function unclaimed(request, state, due_ms)
  request.gateway, request.dispatcher, request.fence, request.claim_nonce = "", nil, 0, nil
  request.probe_until, request.due_ms, request.state = nil, due_ms, state
end

--- leased, delayed -> queued. Keeps the attempt.
function requests.requeue(step, request)
  unclaimed(request, "queued", nil)
  write(step, request, "queued")
end

--- leased -> delayed: the next attempt is due at `due_ms`.
function requests.delay(step, request, due_ms)
  unclaimed(request, "delayed", due_ms)
  write(step, request, "delayed")
end

--- What has been sent of the request's stream: chunks, their bytes, and when the first was sent (nil = none was).
function requests.streamed(request)
  local chunks, bytes, first_ms = string.match(request.stream or "", "^(%d+)|(%d+)|(%d+)$")
  return tonumber(chunks or 0), tonumber(bytes or 0), tonumber(first_ms)
end

--- Note that so much has been sent now.
function requests.note_stream(step, request, chunks, bytes, first_ms)
  request.stream = string.format("%d|%.0f|%.0f", chunks, bytes, first_ms)
  server.call("HSET", keys.of(step.root, "request", request.id), "stream", request.stream)
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
  step.finished = step.finished or {}
  step.finished[#step.finished + 1] = request.id
  if ending == "dead" then -- kept whole, for inspection (state/dead.lua)
    write(step, request, "ended")
    server.call("HSET", request_key, "ending", ending)
    return
  end
  server.call("HSET", request_key, "state", "ended", "ending", ending, "envelope", "", "body", "")
  server.call("PEXPIRE", request_key, keep)
  requests.forget_body(step, request.id, request.nonce, request.bytes)
end

--- Let a request that has ended, and its body, stay for `ttl_ms` from now.
function requests.keep(step, request, ttl_ms)
  server.call("PEXPIRE", keys.of(step.root, "request", request.id), ttl_ms)
  if not is_small(request.bytes) then
    server.call("PEXPIRE", keys.of(step.root, "request_body", request.id, request.nonce), ttl_ms)
  end
end

--- Drop what a request that is kept says; who it was stays readable as long as of any other.
function requests.forget_content(step, request)
  local request_key = keys.of(step.root, "request", request.id)
  server.call("HSET", request_key, "envelope", "", "body", "")
  server.call("PEXPIRE", request_key, step.config.retention_ms)
  requests.forget_body(step, request.id, request.nonce, request.bytes)
end

--- Remove a request that is kept, with everything of it.
function requests.discard(step, request)
  server.call("PEXPIRE", keys.of(step.root, "request", request.id), 1)
  requests.forget_body(step, request.id, request.nonce, request.bytes)
end

--- Hand the body of one request on to another that has not been admitted yet. False when it is not there in full.
function requests.hand_on_body(step, from, to)
  if is_small(from.bytes) then
    to.body = from.body
    return requests.body_is_whole(from)
  end
  local key = keys.of(step.root, "request_body", from.id, from.nonce)
  if server.call("EXISTS", key) == 0 then return false end
  to.body = ""
  server.call("RENAME", key, keys.of(step.root, "request_body", to.id, to.nonce))
  return true
end

--- Forget the deadlines of the requests that ended in this step. One write for all.
function requests.save(step)
  if not step.finished then return end
  server.call("ZREM", keys.of(step.root, "deadlines"), unpack(step.finished))
  step.finished = nil
end

--- Ids whose deadline is before `now`, at most `limit`.
function requests.past_deadline(step, limit)
  requests.save(step) -- or those that ended just now would take the place of others
  return server.call("ZRANGE", keys.of(step.root, "deadlines"), "-inf", step.now, "BYSCORE", "LIMIT", 0, limit)
end

--- A running request is past its deadline: look again when its gateway has had a lease time to stop it.
function requests.postpone_deadline(step, request)
  server.call("ZADD", keys.of(step.root, "deadlines"), request.deadline_ms + step.config.lease_ms, request.id)
end

--- Forget the deadline of a request that is not there any more, and let what cannot be read of it expire.
function requests.forget_deadline(step, id)
  server.call("ZREM", keys.of(step.root, "deadlines"), id)
  server.call("PEXPIRE", keys.of(step.root, "request", id), step.config.retention_ms, "NX")
end

return requests
