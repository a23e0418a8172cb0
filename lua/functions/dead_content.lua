--- dead_content: read what a request in the dead list says: its envelope and its body. No other call shows either.
-- Keys:    group root
-- Args:    request_id
-- Answers: CONTENT envelope body nonce body_bytes (body is "" when it is larger than inline_body_bytes: it stands under
--          its own key then) | UNKNOWN (it is not in the list)
-- Errors:  GROUP_UNKNOWN
-- Moves:   (none)
-- Touches: group, dead, request
-- Flags:   no-writes
-- Cost:    constant
-- Twice:   reads again
local dead = require("state.dead")
local faults = require("state.faults")
local state = require("state.step")

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local request = dead.holds(keys[1], args[1]) and dead.find_whole(step, args[1])
  if not request then return { "UNKNOWN" } end
  return { "CONTENT", request.envelope or "", request.body, request.nonce, request.bytes }
end

return { run = run }
