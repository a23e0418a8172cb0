--- records_watch: say how far a reader of the record streams is, counting what was trimmed before it was read.
-- Keys:    group root
-- Args:    reader (consumer group), prepare (1 = make the reader where it is missing, and count what was trimmed before
--          it read it; 0 = only look)
-- Answers: lost (records of all streams trimmed before this reader read them, ever), then per stream (endings,
--          deliveries) eight cells: length added first_id last_id read_id lag pending lost (now); "" = does not apply
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, endings, deliveries
-- Flags:   allow-oom
-- Cost:    constant
-- Twice:   reads again; what was counted is not counted again
local faults = require("state.faults")
local names = require("lib.names")
local readers = require("state.readers")
local state = require("state.step")

local function cells(root, stream, reader, lost)
  local found = readers.state(root, stream, reader) or {}
  return { found.length or 0, found.added or 0, found.first or "", found.last or "", found.at or "",
    found.lag or "", found.pending or "", lost }
end

local function run(keys, args)
  local reader = args[1]
  if not names.valid(reader) then return faults.bad_argument("reader", reader, names.ALLOWED) end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local answer, lost_now = { 0 }, 0
  for _, stream in ipairs(readers.STREAMS) do
    local lost = 0
    if args[2] == "1" then
      readers.prepare(keys[1], stream, reader)
      lost = readers.skip_trimmed(keys[1], stream, reader)
    end
    lost_now = lost_now + lost
    for _, cell in ipairs(cells(keys[1], stream, reader, lost)) do answer[#answer + 1] = cell end
  end
  if lost_now > 0 then
    step.group.records_lost = step.group.records_lost or {}
    step.group.records_lost[reader] = (step.group.records_lost[reader] or 0) + lost_now
    state.save(step)
  end
  answer[1] = (step.group.records_lost or {})[reader] or 0
  return answer
end

return { run = run }
