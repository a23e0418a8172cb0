--- The sections of a snapshot. Each returns rows, where to go on ("" = the end), and whether something was left out.
-- Scalars only: never a body, never the envelope's metadata. What does not apply is absent; what should have a value
-- and has none is null, never 0.
local breaker = require("lib.breaker")
local chores = require("state.chores")
local dead = require("state.dead")
local endpoints = require("state.endpoints")
local entry = require("lib.entry")
local flows = require("state.flows")
local gate = require("lib.gate")
local group = require("state.group")
local gateways = require("state.gateways")
local keys = require("state.keys")
local pages = require("lib.pages")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")
local timers = require("state.timers")

local sections = {}

-- A page of generations reads whole documents, so it ends after this many bytes of them.
local GENERATION_BYTES_MAX = 2 * 1024 * 1024

-- nil for a pool whose record was lost: an audit tells, and nothing is known of it.
local function pool_row(step, name)
  local pool = pools.get(step, name)
  if not pool then return nil end
  local config, record = pool.config, pool.record
  local row = {
    pool_id = name, display_name = config.display_name, quantum = config.quantum, enabled = config.enabled,
    min_concurrent = config.min_concurrent, max_concurrent = config.max_concurrent,
    max_burst_per_visit = config.max_burst_per_visit, endpoint_id = config.endpoint, delivery = config.delivery,
    max_queue_depth = config.max_queue_depth, max_queue_bytes = config.max_queue_bytes,
    pending = record.depth, pending_bytes = record.bytes, in_flight = record.in_flight, deficit = record.deficit,
    place = record.place, turn = record.turn, submitted = record.submitted, launched = record.launched,
    cost_served = record.cost_served, block_reason = record.reason, block_since_ms = record.reason_since,
    delayed = record.delayed or 0, max_attempts = config.max_attempts, retry_on = config.retry_on,
    on_open = config.on_open, paused = record.paused, draining = record.draining,
    priority_ageing_ms = config.priority_ageing_ms,
  }
  for _, counter in ipairs({ "endings", "rejected", "skips" }) do
    if next(record[counter]) then row[counter] = record[counter] end
  end
  local head = record.depth > 0 and queue.peek(step, pool)
  if head then
    row.head_cost, row.head_submitted_ms = head.cost, head.submitted_ms
  end
  return row
end

--- All pools, or the pool `subject` alone.
function sections.pools(step, details, cursor, limit, subject)
  if subject ~= "" then
    local pool = pools.get(step, subject)
    if not pool then return {}, "" end
    return { pool_row(step, subject) }, ""
  end
  local names, next_cursor = pages.part(details.pools, cursor, limit)
  local rows = {}
  for _, name in ipairs(names) do rows[#rows + 1] = pool_row(step, name) end
  return rows, next_cursor
end

-- What should be known and may not be: a number, or null.
local function or_null(value)
  if value == nil then return cjson.null end
  return value
end

-- The breaker: its state (closed, open, half_open), since when it is not closed, the probe that is under way, and when
-- a gateway asks the endpoint if no request does before.
local function add_breaker(row, step, name, record)
  local now = step.now
  row.breaker = breaker.state(record, now)
  row.failures_in_a_row = record.in_a_row or 0
  if row.breaker ~= "closed" then
    row.breaker_since_ms = row.breaker == "open" and record.opened_ms or record.open_until
    row.open_until_ms, row.good_probes = record.open_until, record.good or 0
    row.next_probe_ms = chores.due_at(step, "probe", name)
  end
  local probe = breaker.probing(record, now) and record.probe
  if probe then
    row.probe = { request_id = probe.id ~= "" and probe.id or nil, gateway_id = probe.gateway, since_ms = probe.since,
      until_ms = probe.until_ms }
  end
end

-- The gate: what it goes by and the last sample. A stale sample is shown, and that it is.
local function add_gate(row, endpoint, now)
  local config, sample = endpoint.config, endpoint.record.gate or {}
  row.gate = {
    engine = config.gate, target = config.gate_target, token_limit_ms = config.gate_token_ms, fail = config.gate_fail,
    stale_after_ms = config.gate_stale_ms, waiting = or_null(sample.waiting), token_ms = or_null(sample.token_ms),
    sampled_ms = or_null(sample.at), age_ms = or_null(sample.at and now - sample.at),
    launched_since = or_null(sample.launched), gateway_id = or_null(sample.gateway),
    stale = gate.stale(endpoint.record, config, now),
  }
end

local function endpoint_row(step, name)
  local endpoint = endpoints.get(step, name)
  local config, record = endpoint.config, endpoint.record
  local reason, until_ms = endpoints.block_reason(step, endpoint)
  local row = { endpoint_id = name, url = config.url, max_concurrent = config.max_concurrent,
    in_flight = record.in_flight, waiting_pools = record.waiting, turn_of = record.holder, attempts = record.attempts,
    failures = record.failures, last_error_type = record.last_error, last_error_ms = record.last_error_ms,
    hold_until_ms = step.now < (record.hold_until or 0) and record.hold_until or nil,
    block_reason = reason, blocked_until_ms = until_ms }
  if config.breaker_failures then -- it is configured (still)
    row.breaker_failures, row.close_after = config.breaker_failures, config.close_after
    add_breaker(row, step, name, record)
  end
  if gate.configured(config) then add_gate(row, endpoint, step.now) end
  return row
end

function sections.endpoints(step, details, cursor, limit)
  local names, next_cursor = pages.part(details.endpoints, cursor, limit)
  local rows = {}
  for at, name in ipairs(names) do rows[at] = endpoint_row(step, name) end
  return rows, next_cursor
end

function sections.gateways(step, _, cursor, limit)
  local names, next_cursor = pages.part(gateways.names(step.root), cursor, limit)
  local rows = {}
  for _, name in ipairs(names) do
    local about = gateways.entry(step.root, name)
    if about then
      rows[#rows + 1] = { gateway_id = name, host = about.host, pid = tonumber(about.pid), version = about.version,
        slots = tonumber(about.slots), started_ms = tonumber(about.started_ms), beat_ms = tonumber(about.beat_ms),
        draining = about.draining == "1", in_flight = gateways.held(step.root, name) }
    end
  end
  return rows, next_cursor
end

-- The attempts that are over, as rows. `status`: what the endpoint answered, null if nothing.
local function tries_rows(request)
  if not request.tries then return nil end
  local rows = {}
  for at, one in ipairs(request.tries) do
    rows[at] = { attempt = one[1], claimed_ms = one[2], ended_ms = one[3], status = or_null(tonumber(one[4])),
      error_type = one[5], gateway_id = one[6], endpoint_id = one[7] }
  end
  return rows
end

local function row_of(request)
  local leased = request.state == "leased"
  local chunks, _, first_chunk_ms = requests.streamed(request)
  return {
    request_id = request.id, state = request.state, ending = request.ending or nil, pool_id = request.pool,
    producer_id = request.producer, model = request.model, message_count = request.message_count, cost = request.cost,
    attempt = request.attempt, submitted_ms = request.submitted_ms, deadline_ms = request.deadline_ms,
    body_bytes = request.bytes, priority = request.level, detached = request.detached or false,
    fairness_key = request.flow ~= flows.SHARED and request.flow or nil,
    claimed_ms = leased and request.claimed_ms or nil, due_ms = request.state == "delayed" and request.due_ms or nil,
    gateway_id = leased and request.gateway or nil, dispatcher_id = leased and request.dispatcher or nil,
    endpoint_id = leased and request.endpoint or nil, cancel_asked_by = request.cancel or nil,
    probe_until_ms = leased and request.probe_until or nil, tries = tries_rows(request),
    chunks = first_chunk_ms and chunks or nil, first_chunk_ms = first_chunk_ms,
  }
end

local function request_row(step, id)
  local request = requests.get(step, id)
  return request and row_of(request)
end

-- The last try of a dead request is not among its earlier ones: it is told by the request itself.
local function dead_row(request, died_ms)
  local row = row_of(request)
  row.died_ms, row.last_error_type = died_ms, "lost"
  row.tries = row.tries or {}
  row.tries[#row.tries + 1] = { attempt = request.attempt, claimed_ms = request.claimed_ms, ended_ms = died_ms,
    status = cjson.null, error_type = "lost", gateway_id = request.gateway, endpoint_id = request.endpoint }
  return row
end

--- Running requests, the one whose lease ends first in front.
function sections.leases(step, _, cursor, limit)
  local from = tonumber(cursor) or 0
  local found = server.call("ZRANGE", keys.of(step.root, "leases"), from, from + limit - 1, "WITHSCORES")
  local rows = {}
  for at = 1, #found, 2 do
    local row = request_row(step, found[at])
    if row then
      row.lease_until_ms = tonumber(found[at + 1])
      rows[#rows + 1] = row
    end
  end
  return rows, #found == 2 * limit and tostring(from + limit) or ""
end

--- Waiting requests of the pool `subject`: flow by flow, each flow in its order. Entries whose request has ended are
-- left out.
function sections.waiting(step, _, cursor, limit, subject)
  local rows, pool = {}, pools.get(step, subject)
  if not pool then return rows, "" end
  local found, next_cursor = queue.page(step, pool, cursor, limit, true)
  for _, item in ipairs(found) do
    local row = request_row(step, entry.decode(item.text).id)
    if row and row.state == "queued" then rows[#rows + 1] = row end
  end
  return rows, next_cursor
end

-- Fields of an ending record that are shown, and whether they are numbers.
local ENDING_FIELDS = { request_id = "text", ending = "text", outcome = "text", pool = "text", producer = "text",
  gateway = "text", endpoint = "text", error_type = "text", attempt = "number", cost = "number",
  submitted_ms = "number", claimed_ms = "number", ended_ms = "number", status = "number", input_tokens = "number",
  output_tokens = "number", chunks = "number", first_chunk_ms = "number", left_out = "number" }

--- Requests that ended dead and are kept, the last that died in front: all of them, or those of the pool `subject` (a
-- page then has fewer rows than it looked at).
function sections.delayed(step, _, cursor, limit, subject)
  local from = tonumber(cursor) or 0
  local members, rows = timers.page(step, from, limit), {}
  for _, member in ipairs(members) do
    local id = string.match(member, "^retry:(.*)$")
    local row = id and request_row(step, id)
    if row and row.state == "delayed" and (subject == "" or row.pool_id == subject) then rows[#rows + 1] = row end
  end
  return rows, #members == limit and tostring(from + limit) or ""
end

function sections.dead(step, _, cursor, limit, subject)
  local rows = {}
  local found, next_cursor = dead.page(step.root, cursor, limit)
  for _, member in ipairs(found) do
    local request = dead.find(step, member.id)
    if request and (subject == "" or request.pool == subject) then
      rows[#rows + 1] = dead_row(request, member.died_ms)
    end
  end
  return rows, next_cursor
end

--- Recent endings, the newest first. `cursor` is the stream id to go on from.
function sections.endings(step, _, cursor, limit)
  local from = cursor ~= "" and "(" .. cursor or "+"
  local found = server.call("XREVRANGE", keys.of(step.root, "endings"), from, "-", "COUNT", limit)
  local rows, last = {}, ""
  for at, record in ipairs(found) do
    local row = { record_id = record[1], chunks = 0 }
    for cell = 1, #record[2], 2 do
      local name, value = record[2][cell], record[2][cell + 1]
      local kind = ENDING_FIELDS[name]
      if kind and value ~= "" then row[name] = kind == "number" and tonumber(value) or value end
    end
    rows[at], last = row, record[1]
  end
  return rows, #found == limit and last or ""
end

--- What changed, the newest first: config, pauses, breakers, repairs; each row has the event's own facts as words.
function sections.events(step, _, cursor, limit)
  local from = cursor ~= "" and "(" .. cursor or "+"
  local found = server.call("XREVRANGE", keys.of(step.root, "events"), from, "-", "COUNT", limit)
  local rows = {}
  for at, event in ipairs(found) do
    local row = { event_id = event[1] }
    for cell = 1, #event[2], 2 do row[event[2][cell]] = event[2][cell + 1] end
    row.at_ms = tonumber(row.at_ms)
    rows[at] = row
  end
  return rows, #found == limit and found[limit][1] or ""
end

--- Config generations, the newest first, without their documents. `cursor` is the generation to go on from.
function sections.generations(step, _, cursor, limit)
  local rows, bytes, from = {}, 0, tonumber(string.match(cursor, "^%d+$") or "")
  while #rows < limit and bytes < GENERATION_BYTES_MAX do
    local found = group.generation_before(step.root, from)
    if not found then return rows, "" end
    rows[#rows + 1] = { generation = found.generation, actor = found.actor, reason = found.reason,
      changed_ms = found.changed_ms, changed = found.changed }
    bytes, from = bytes + #found.document, found.generation
  end
  return rows, tostring(from)
end

--- One request. A dead one that is kept says when it died, and of its last try.
function sections.request(step, _, _, _, subject)
  local died_ms = dead.holds(step.root, subject)
  local request = died_ms and dead.find(step, subject)
  return { request and dead_row(request, died_ms) or request_row(step, subject) }, ""
end

return sections
