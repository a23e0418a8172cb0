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

local function append(answer, found, lost)
  for _, cell in ipairs({ found.length or 0, found.added or 0, found.first or "", found.last or "", found.at or "",
    found.lag or "", found.pending or "", lost }) do
    answer[#answer + 1] = cell
  end
end

local function run(keys, args)
  local reader = args[1]
  if not names.valid(reader) then return faults.bad_argument("reader", reader, names.ALLOWED) end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local answer, lost_now = { 0 }, 0
  for _, stream in ipairs(readers.STREAMS) do
    local found, lost = readers.watch(keys[1], stream, reader, args[2] == "1")
    lost_now = lost_now + lost
    append(answer, found or {}, lost)
  end
  local lost = step.group.records_lost or {}
  answer[1] = (lost[reader] or 0) + lost_now
  if lost_now > 0 then
    lost[reader] = answer[1]
    step.group.records_lost = lost
    state.save(step)
  end
  return answer
end

return { run = run }
