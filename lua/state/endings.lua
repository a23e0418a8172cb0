--- The one place where a request ends: state, counters, reply and record change in the same step.
local dead = require("state.dead")
local keys = require("state.keys")
local pools = require("state.pools")
local producers = require("state.producers")
local refusals = require("lib.refusals")
local replies = require("state.replies")
local requests = require("state.requests")
local results = require("state.results")
local schema = require("schema")
local tries = require("lib.tries")

local endings = {}

local MESSAGE_MAX = 500

-- Why the request was not launched sooner: the last reason for which its pool was skipped while it waited.
local function skip_reason(step, request)
  local pool = request.state == "queued" and pools.get(step, request.pool)
  return pool and pools.skipped_since(pool, request) or request.skip or ""
end

-- What most endings have nothing to say about is left out when it is empty.
local function add(cells, name, value)
  if not value or value == "" then return end
  local at = #cells
  cells[at + 1], cells[at + 2] = name, value
end

local function add_stream(cells, request)
  local chunks, _, first_chunk_ms = requests.streamed(request)
  add(cells, "chunks", chunks)
  add(cells, "first_chunk_ms", first_chunk_ms)
end

local function add_tries(cells, request)
  add(cells, "tries", tries.encode(request.tries))
  add(cells, "tried", tries.encode_details(request.tries))
end

-- Scalars and texts that are ours, never a body's. What the gateway alone knows stands in `details` (JSON it wrote).
local function append(step, request, ending, facts)
  local cells = { "request_id", request.id, "ending", ending, "outcome", facts.outcome or ending,
    "pool", request.pool, "producer", request.producer, "attempt", request.attempt, "cost", request.cost,
    "bytes", request.bytes, "submitted_ms", request.submitted_ms,
    "ended_ms", step.now }
  add(cells, "gateway", request.gateway)
  add(cells, "dispatcher", request.dispatcher)
  add(cells, "endpoint", request.endpoint)
  add(cells, "skip_reason", skip_reason(step, request))
  if request.state == "leased" then add(cells, "claimed_ms", request.claimed_ms) end
  add(cells, "status", facts.status)
  add(cells, "error_type", facts.error_type)
  if facts.error_message then add(cells, "error_message", string.sub(facts.error_message, 1, MESSAGE_MAX)) end
  add(cells, "input_tokens", facts.input_tokens)
  add(cells, "output_tokens", facts.output_tokens)
  if request.stream then add_stream(cells, request) end
  if request.tries then add_tries(cells, request) end
  add(cells, "details", facts.details)
  add(cells, "envelope", request.envelope)
  server.call("XADD", keys.of(step.root, "endings"), "MAXLEN", "~", schema.limits.endings_kept, "*", unpack(cells))
end

local function append_rejected(step, refused)
  server.call("XADD", keys.of(step.root, "endings"), "MAXLEN", "~", schema.limits.endings_kept, "*",
    "request_id", refused.id or "", "ending", "rejected", "outcome", "rejected", "pool", refused.pool,
    "producer", refused.producer or "", "bytes", refused.bytes or "", "submitted_ms", step.now, "ended_ms", step.now,
    "error_type", refused.reason, "error_message", schema.refusals[refused.reason] or "",
    "left_out", refused.count or "", "envelope", refused.envelope or "")
end

--- Record what was refused in a flood and only counted, when its second is over.
function endings.note_left_out(step)
  for _, counted in ipairs(refusals.take(step.group, step.now)) do append_rejected(step, counted) end
end

--- Record that a submit was refused for `reason`; in a flood only the first of each second.
function endings.reject(step, request, reason)
  endings.note_left_out(step)
  if refusals.noted(step.group, step.now, request.pool, reason) then
    append_rejected(step, { id = request.id, pool = request.pool, producer = request.producer, bytes = request.bytes,
      reason = reason, envelope = request.envelope })
  end
end

--- End `request` (in whatever state it is) as `ending`. `facts`: outcome, status, error_type, error_message, tokens,
-- details and `reply` (head, body, by_reference) when a gateway wrote one. The producer is told if it lives.
-- Counters of queue and slots are the caller's: it knows where the request stood.
function endings.finish(step, request, ending, facts)
  append(step, request, ending, facts)
  -- A producer that was taken for gone may be back by now: then it waits for word of this.
  local told = ending ~= "reply_dropped" and not request.detached and request.producer ~= ""
    and producers.alive(step, request.producer)
  local kept = results.wanted(request)
  if told or kept then
    local reply = facts.reply and facts.reply.head ~= "" and facts.reply
      or { head = replies.own_head(facts.error_type or ending, facts.error_message or ""), body = "" }
    local said = ending == "reply_dropped" and facts.outcome or ending -- only a repeat will read it
    local frame = replies.frame(step, request, said, reply)
    if told then replies.push(step, request, frame) end
    if kept then
      results.keep(step, request, frame)
      if reply.by_reference then replies.keep_body(step, request.id, step.config.idempotency_ttl_ms) end
    end
  elseif facts.reply and facts.reply.by_reference then
    replies.forget_body(step, request.id)
  end
  if request.idempotency and not kept then results.release(step, request) end
  requests.finish(step, request, ending)
  if ending == "dead" then dead.add(step, request) end
  request.state = "ended"
  local pool = pools.get(step, request.pool)
  if pool then pools.count(pool, "endings", ending) end
  step.ended = step.ended + 1
end

--- The id of the newest record, "" when there is none.
function endings.newest(root)
  local found = server.call("XREVRANGE", keys.of(root, "endings"), "+", "-", "COUNT", 1)[1]
  return found and found[1] or ""
end

return endings
