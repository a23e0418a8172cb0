--- group_configure: validate and apply a whole config, if the generation in force is the expected one. All or nothing.
-- Keys:    group root
-- Args:    contract, expected_generation (0 = never configured), document (JSON), actor, reason, nonce, mode (apply;
--          check = say what apply would answer and change, and change nothing)
-- Answers: APPLIED generation actor changed_ms changed, then for the first 200 changes: field before after |
--          VALID generation "" 0 changed, then the same of what apply would do |
--          UNCHANGED generation actor changed_ms | CONFLICT generation actor changed_ms |
--          INVALID generation, then per problem: field value message
-- Errors:  CONTRACT_MISMATCH
-- Moves:   (none)
-- Touches: group, pool, endpoint, generations, events, rotation, kept, heads, waiting, requests, returned, wake,
--          timers, chores
-- Flags:   (none)
-- Cost:    linear in the pools; those that changed are placed anew
-- Twice:   same nonce: APPLIED again, without its changes; another nonce with the same expectation: CONFLICT
local changes = require("lib.changes")
local config = require("lib.config")
local document_text = require("lib.document")
local events = require("state.events")
local faults = require("state.faults")
local group = require("state.group")
local placement = require("state.placement")
local pools = require("state.pools")
local schema = require("schema")
local state = require("state.step")

local MAX_PROBLEMS, MAX_CHANGES = 50, 200

local function invalid(generation, problems)
  local answer = { "INVALID", generation }
  for index = 1, math.min(#problems, MAX_PROBLEMS) do
    local problem = problems[index]
    answer[#answer + 1], answer[#answer + 2] = problem.field, problem.value
    answer[#answer + 1] = problem.message
  end
  return answer
end

local function with_changes(answer, found)
  answer[#answer + 1] = found.count
  for _, change in ipairs(found.shown) do
    for _, cell in ipairs(change) do answer[#answer + 1] = cell end
  end
  return answer
end

-- A pool that is left out must be empty: its requests would be stranded.
local function check_removed(step, names, problems)
  for _, name in ipairs(names) do
    local record = pools.get(step, name).record
    local delayed = record.delayed or 0
    if record.depth > 0 or record.in_flight > 0 or delayed > 0 then
      problems[#problems + 1] = { field = "pools", value = name, message = string.format(
        "cannot be removed: %d wait, %d wait for their next attempt and %d run in it; run: dispatch pools drain %s",
        record.depth, delayed, record.in_flight, name) }
    end
  end
end

local function group_config(document, generation)
  local found = { generation = generation }
  for _, field in ipairs(config.FIELDS.group) do found[field[1]] = document[field[1]] end
  return found
end

local function run(keys, args)
  local root, expected, actor, reason, nonce = keys[1], tonumber(args[2]), args[4], args[5], args[6]
  local check = args[7] == "check"
  if tonumber(args[1]) ~= schema.contract.version then
    return faults.contract_mismatch(args[1], schema.contract.version)
  end
  local details = group.details(root)
  if details.nonce == nonce and not check then
    return { "APPLIED", details.generation, details.actor, details.changed_ms, 0 }
  end
  if details.generation ~= expected then
    return { "CONFLICT", details.generation, details.actor, details.changed_ms }
  end
  local decoded, source = pcall(cjson.decode, args[3])
  if not decoded then
    local shown = string.sub(args[3], 1, 60)
    return invalid(details.generation, { { field = "document", value = shown, message = "not JSON" } })
  end
  local document, problems = config.normalise(source)
  local step = state.begin(root) or placement.first_step(root)
  if #problems > 0 then return invalid(details.generation, problems) end
  local before = placement.in_force(step, details)
  local after = { group = document, pools = document.pools, endpoints = document.endpoints }
  local found = changes.between(before, after, MAX_CHANGES)
  check_removed(step, found.gone, problems)
  if #problems > 0 then return invalid(details.generation, problems) end
  local text
  text, after.texts = document_text.encode(document)
  -- The same text changes something when a pool or an endpoint was taken out past the library: it is made again.
  if found.count == 0 then
    if text == group.document(root) then
      return { "UNCHANGED", details.generation, details.actor, details.changed_ms }
    end
    changes.note_order(found)
  end
  if check then return with_changes({ "VALID", details.generation, "", 0 }, found) end

  local generation = details.generation + 1
  step.config = group_config(document, generation)
  placement.apply(step, before, after, found)
  local names, addresses = {}, {}
  for index, pool in ipairs(document.pools) do names[index] = pool.pool_id end
  for index, endpoint in ipairs(document.endpoints) do addresses[index] = endpoint.endpoint_id end
  group.save_generation(root, step.config, { document = text, generation = generation, actor = actor, reason = reason,
    changed_ms = step.now, nonce = nonce, pools = names, endpoints = addresses, changed = found.count,
    changes = cjson.encode(found.shown) })
  events.append(root, step.now, "config",
    { "generation", generation, "actor", actor, "reason", reason, "changed", found.count })
  state.save(step)
  return with_changes({ "APPLIED", generation, actor, step.now }, found)
end

return { run = run }
