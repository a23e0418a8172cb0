--- Reply frames in a producer's list. Read without removing; trimmed when the producer says what it has handed over.
-- Header: contract|sequence|kind|request_id|ending|pool|attempt|queue_ms|execution_ms|by_reference|tries|submitted_ms|
-- traceparent; then the gateway's head and the body, each after a newline, which Lua does not read. `tries`: see
-- lib/tries.lua; submitted_ms and traceparent let whoever reads the header alone find the request's trace.
local keys = require("state.keys")
local schema = require("schema")
local tries = require("lib.tries")
local wake = require("state.wake")

local replies = {}

-- The producer's W3C trace context. The envelope is not decoded: within a JSON string no quote stands by itself.
local function traceparent(request)
  return string.match(request.envelope or "", '"traceparent":"([%x-]+)"') or ""
end

local function header(step, request, ending, by_reference)
  step.group.frame = step.group.frame + 1
  local waited_until, execution_ms = step.now, ""
  if request.state == "leased" then
    waited_until = request.claimed_ms
    execution_ms = string.format("%d", step.now - request.claimed_ms)
  end
  local queue_ms = string.format("%d", waited_until - request.submitted_ms)
  return string.format("%d|%d|terminal|%s|%s|%s|%d|%s|%s|%d|%s|%.0f|%s", schema.contract.version, step.group.frame,
    request.id, ending, request.pool, request.attempt, queue_ms, execution_ms, by_reference and 1 or 0,
    tries.encode(request.tries), request.submitted_ms, traceparent(request))
end

--- The terminal frame of a request. `reply`: head and body are the gateway's bytes.
function replies.frame(step, request, ending, reply)
  return header(step, request, ending, reply.by_reference) .. "\n" .. reply.head .. "\n" .. reply.body
end

--- Push a frame to the request's producer. Returns how many stand in its list now.
function replies.push(step, request, frame)
  local key = keys.of(step.root, "replies", request.producer)
  local length = server.call("RPUSH", key, frame)
  if length == 1 then -- later frames find the expiry set, and the producer's heartbeat renews it
    server.call("PEXPIRE", key, step.config.reply_ttl_ms)
    wake.ring_producer(step, request.producer)
  end
  return length
end

--- How many bytes of stream chunks the producer has not taken yet.
function replies.backlog(step, producer)
  return tonumber(server.call("GET", keys.of(step.root, "reply_bytes", producer)) or 0)
end

--- Push chunks of a stream, the first of which has this `number`. `payload` is the gateway's bytes.
function replies.push_chunks(step, request, number, payload)
  step.group.frame = step.group.frame + 1
  local frame = string.format("%d|%d|chunks|%s|%d\n", schema.contract.version, step.group.frame, request.id, number)
    .. payload
  local length = replies.push(step, request, frame)
  local bytes_key = keys.of(step.root, "reply_bytes", request.producer)
  if length == 1 then -- nothing else was there, whatever the count says
    server.call("SET", bytes_key, #frame, "PX", step.config.reply_ttl_ms)
  else
    server.call("INCRBY", bytes_key, #frame)
    server.call("PEXPIRE", bytes_key, step.config.reply_ttl_ms)
  end
end

--- The head of a reply that no gateway wrote.
function replies.own_head(error_type, message)
  return cjson.encode({ error = { type = error_type, message = message, source = "dispatch" } })
end

--- Remove frames up to sequence `upto`. Returns how many went, how many are left, and the header lines of the terminal
-- ones that went.
function replies.trim(root, producer, upto)
  local key = keys.of(root, "replies", producer)
  local trimmed, chunk_bytes, lines = 0, 0, {}
  while true do
    local frames = server.call("LRANGE", key, 0, 63)
    local count = 0
    for _, frame in ipairs(frames) do
      local sequence, kind = string.match(string.sub(frame, 1, 40), "^%d+|(%d+)|(%a*)")
      if sequence and tonumber(sequence) > upto then break end
      if kind == "chunks" then chunk_bytes = chunk_bytes + #frame end
      if kind == "terminal" then lines[#lines + 1] = string.match(frame, "^[^\n]*") end
      count = count + 1
    end
    if count > 0 then server.call("LTRIM", key, count, -1) end
    trimmed = trimmed + count
    if count < 64 then break end
  end
  local left, bytes_key = server.call("LLEN", key), keys.of(root, "reply_bytes", producer)
  if chunk_bytes > 0 and left == 0 then
    server.call("DEL", bytes_key)
  elseif chunk_bytes > 0 and server.call("EXISTS", bytes_key) == 1 then -- or it would be made anew, without an expiry
    server.call("DECRBY", bytes_key, chunk_bytes)
  end
  return trimmed, left, lines
end

--- Let a large reply stay for `ttl_ms` from now.
function replies.keep_body(step, id, ttl_ms)
  server.call("PEXPIRE", keys.of(step.root, "reply_body", id), ttl_ms)
end

--- Forget a large reply nobody will read.
function replies.forget_body(step, id)
  server.call("PEXPIRE", keys.of(step.root, "reply_body", id), 1) -- freed outside this call
end

return replies
