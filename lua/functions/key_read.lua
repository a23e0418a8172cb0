--- key_read: the record of one caller's key, or of all.
-- Keys:    group root
-- Args:    key_id ("" = all)
-- Answers: then per key: key_id record
-- Errors:  (none)
-- Moves:   (none)
-- Touches: keys
-- Flags:   no-writes
-- Cost:    linear in the keys that are read, of which there is a bounded number
-- Twice:   reads again
local api_keys = require("state.api_keys")

local function run(keys, args)
  local id = args[1] or ""
  if id == "" then return api_keys.all(keys[1]) end
  local record = api_keys.find(keys[1], id)
  return record and { id, record } or {}
end

return { run = run }
