--- The sections of a snapshot. Each returns rows, where to go on ("" = the end), and whether something was left out.
-- Scalars only: never a body, never the envelope's metadata. What is not known is absent, never 0.
local endpoints = require("state.endpoints")
local entry = require("lib.entry")
local flows = require("state.flows")
local group = require("state.group")
local gateways = require("state.gateways")
local keys = require("state.keys")
local pages = require("lib.pages")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")

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
    paused = record.paused, draining = record.draining, priority_ageing_ms = config.priority_ageing_ms,
  }
  for _, counter in ipairs({ "endings", "rejected", "skips" }) do
    if next(record[counter]) then row[counter] = record[counter] end
  end
  if record.depth > 0 and record.head then
    local head = entry.decode(record.head)
    row.head_cost, row.head_submitted_ms = head.cost, head.submitted_ms
  end
  return row
end

--- All pools, or the pool `subject` alone.
function sections.pools(step, details, cursor, limit, subject)
  if subject ~= "" then
    local pool = pools.get(step, subject)
    if not pool then return {}, "" end
    queue.peek(step, pool) -- its record then knows the head
    return { pool_row(step, subject) }, ""
  end
  local names, next_cursor = pages.part(details.pools, cursor, limit)
  local rows = {}
  for _, name in ipairs(names) do rows[#rows + 1] = pool_row(step, name) end
  return rows, next_cursor
end

function sections.endpoints(step, details, cursor, limit)
  local names, next_cursor = pages.part(details.endpoints, cursor, limit)
  local rows = {}
  for at, name in ipairs(names) do
    local endpoint = endpoints.get(step, name)
    local config, record = endpoint.config, endpoint.record
    rows[at] = { endpoint_id = name, url = config.url, max_concurrent = config.max_concurrent,
      in_flight = record.in_flight, waiting_pools = record.waiting, attempts = record.attempts,
      failures = record.failures, last_error_type = record.last_error, last_error_ms = record.last_error_ms,
      block_reason = endpoints.block_reason(endpoint) }
  end
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

local function request_row(step, id)
  local request = requests.get(step, id)
  if not request then return nil end
  local leased = request.state == "leased"
  return {
    request_id = id, state = request.state, ending = request.ending or nil, pool_id = request.pool,
    producer_id = request.producer, model = request.model, message_count = request.message_count, cost = request.cost,
    attempt = request.attempt, submitted_ms = request.submitted_ms, deadline_ms = request.deadline_ms,
    body_bytes = request.bytes, priority = request.level,
    fairness_key = request.flow ~= flows.SHARED and request.flow or nil,
    claimed_ms = leased and request.claimed_ms or nil,
    gateway_id = leased and request.gateway or nil, dispatcher_id = leased and request.dispatcher or nil,
    endpoint_id = leased and request.endpoint or nil, cancel_asked_by = request.cancel or nil,
  }
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
  local found, next_cursor = queue.page(step, pool, cursor, limit)
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
  output_tokens = "number" }

--- Recent endings, the newest first. `cursor` is the stream id to go on from.
function sections.endings(step, _, cursor, limit)
  local from = cursor ~= "" and "(" .. cursor or "+"
  local found = server.call("XREVRANGE", keys.of(step.root, "endings"), from, "-", "COUNT", limit)
  local rows, last = {}, ""
  for at, record in ipairs(found) do
    local row = { record_id = record[1] }
    for cell = 1, #record[2], 2 do
      local name, value = record[2][cell], record[2][cell + 1]
      local kind = ENDING_FIELDS[name]
      if kind and value ~= "" then row[name] = kind == "number" and tonumber(value) or value end
    end
    rows[at], last = row, record[1]
  end
  return rows, #found == limit and last or ""
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

--- One request.
function sections.request(step, _, _, _, subject)
  return { request_row(step, subject) }, ""
end

return sections
