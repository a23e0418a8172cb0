--- reply_ack: remove the frames a producer has handed over, up to a sequence, and record which replies those were.
-- Keys:    group root
-- Args:    producer, session, upto (frame sequence)
-- Answers: OK trimmed remaining | NOT_OWNER
-- Errors:  BAD_ARGUMENT
-- Moves:   (none)
-- Touches: replies, reply_bytes, alive, deliveries
-- Flags:   allow-oom
-- Cost:    linear in the frames removed
-- Twice:   removes nothing more
local deliveries = require("state.deliveries")
local faults = require("state.faults")
local producers = require("state.producers")
local replies = require("state.replies")

local function run(keys, args)
  local upto = tonumber(args[3])
  if not upto then return faults.bad_argument("upto", args[3], "a frame sequence") end
  local owner = producers.session(keys[1], args[1])
  if owner and owner ~= args[2] then return { "NOT_OWNER" } end
  local trimmed, remaining, lines = replies.trim(keys[1], args[1], upto)
  deliveries.append(keys[1], args[1], lines)
  return { "OK", trimmed, remaining }
end

return { run = run }
