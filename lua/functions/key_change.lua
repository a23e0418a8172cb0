--- key_change: create or revoke a caller's key.
-- Keys:    group root
-- Args:    action (create, revoke), key_id, record (JSON with the secret's hash; "" for revoke), actor
-- Answers: CREATED | EXISTS | FULL limit | REVOKED | UNKNOWN
-- Errors:  BAD_ARGUMENT
-- Moves:   (none)
-- Touches: keys, events
-- Flags:   (none)
-- Cost:    constant
-- Twice:   EXISTS; UNKNOWN
local api_keys = require("state.api_keys")
local clock = require("state.clock")
local events = require("state.events")
local faults = require("state.faults")
local names = require("lib.names")
local schema = require("schema")

local actions = {}

function actions.create(root, id, record)
  if #record == 0 or #record > schema.limits.key_record_bytes then
    return faults.bad_argument("record", #record .. " bytes", "1 to " .. schema.limits.key_record_bytes)
  end
  if api_keys.count(root) >= schema.limits.keys_max then return { "FULL", schema.limits.keys_max } end
  return { api_keys.create(root, id, record) and "CREATED" or "EXISTS" }
end

function actions.revoke(root, id)
  return { api_keys.revoke(root, id) and "REVOKED" or "UNKNOWN" }
end

local function run(keys, args)
  local root, action, id = keys[1], args[1], args[2]
  if not actions[action] then return faults.bad_argument("action", action, "create, revoke") end
  if not names.valid(id) then return faults.bad_argument("key_id", id, names.ALLOWED) end
  local answer = actions[action](root, id, args[3] or "")
  if answer[1] == "CREATED" or answer[1] == "REVOKED" then
    events.append(root, clock.now_ms(), "key", { "action", action, "key", id, "actor", args[4] or "" })
  end
  return answer
end

return { run = run }
