--- fabric_snapshot: read one section of the group's state, a page at a time.
-- Keys:    group root
-- Args:    section (group config generation generations pools endpoints gateways leases waiting delayed dead endings
--          events request), cursor ("" = from the start), limit (rows), subject (pool for waiting and, if it is to be
--          the only one, for pools, delayed and dead; request_id for request; number for generation)
-- Answers: JSON text: server_ms, section, and either the section's own fields (group, config, generation) or rows,
--          cursor ("" = the end) and truncated
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, pool, endpoint, gateway, gateways, holding, leases, requests, flow, flows, returned, request, dead,
--          endings, events, generations, timers, chores
-- Flags:   no-writes
-- Cost:    linear in limit
-- Twice:   reads again
local dead = require("state.dead")
local faults = require("state.faults")
local group = require("state.group")
local readers = require("state.readers")
local retry = require("lib.retry")
local schema = require("schema")
local sections = require("state.sections")
local state = require("state.step")

local SECTIONS = "group, config, generation, generations, pools, endpoints, gateways, leases, waiting, delayed, dead, "
  .. "endings, events, request"

local function tenths(number)
  return math.floor(number * 10 + 0.5) / 10
end

-- The retry budget: first attempts and retries of the last ten seconds (estimated), and how many retries it allows.
local function budget(step)
  local first, retries, allowed = retry.budget(step.group, step.config, step.now)
  return { first_attempts_10s = tenths(first), retries_10s = tenths(retries), allowed_10s = tenths(allowed) }
end

local function group_text(step, details)
  local config, record = step.config, step.group
  local sleeping = 0
  for _ in pairs(record.sleepers) do sleeping = sleeping + 1 end
  local rows = readers.rows(step.root)
  local text = cjson.encode({
    server_ms = step.now, section = "group", generation = details.generation, policy = config.policy,
    total_concurrent_dispatch = config.total_concurrent_dispatch, max_queued = config.max_queued,
    cost_min = config.cost_min, cost_max = config.cost_max, lease_ms = config.lease_ms,
    liveness_ms = config.liveness_ms, pending = record.queued, in_flight = record.in_flight, pools = #details.pools,
    delayed = record.delayed or 0, dead = dead.count(step), retry_budget = budget(step),
    next_due_ms = record.next_timer, next_chore_ms = record.next_chore,
    last_beat_ms = record.last_beat, grace_until_ms = record.grace_until, sleeping_gateways = sleeping,
    sequence = record.seq, round = record.round,
  })
  return string.sub(text, 1, -2) .. ',"readers":' .. (#rows > 0 and cjson.encode(rows) or "[]") .. "}"
end

local function config_text(step, details)
  local head = cjson.encode({ server_ms = step.now, section = "config", generation = details.generation,
    actor = details.actor, reason = details.reason, changed_ms = details.changed_ms })
  return string.sub(head, 1, -2) .. ',"document":' .. group.document(step.root) .. "}"
end

-- A generation of the history, with its document and what it changed.
local function generation_text(step, number)
  local found = string.match(number, "^%d+$") and group.generation(step.root, tonumber(number))
  if not found then return faults.bad_argument("subject", number, "a generation that is kept") end
  local head = cjson.encode({ server_ms = step.now, section = "generation", generation = found.generation,
    actor = found.actor, reason = found.reason, changed_ms = found.changed_ms, changed = found.changed })
  return string.sub(head, 1, -2) .. ',"changes":' .. found.changes .. ',"document":' .. found.document .. "}"
end

local function run(keys, args)
  local section, cursor, limit, subject = args[1], args[2] or "", tonumber(args[3]), args[4] or ""
  if not limit or limit < 1 or limit > schema.limits.snapshot_page_max then
    return faults.bad_argument("limit", args[3], "1 to " .. schema.limits.snapshot_page_max)
  end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local details = group.details(keys[1])
  if section == "group" then return group_text(step, details) end
  if section == "config" then return config_text(step, details) end
  if section == "generation" then return generation_text(step, subject) end
  local read = sections[section]
  if not read then return faults.bad_argument("section", section, SECTIONS) end
  local rows, next_cursor = read(step, details, cursor, limit, subject)
  local head = cjson.encode({ server_ms = step.now, section = section, cursor = next_cursor,
    truncated = next_cursor ~= "" })
  local body = #rows > 0 and cjson.encode(rows) or "[]"
  return string.sub(head, 1, -2) .. ',"rows":' .. body .. "}"
end

return { run = run }
