--- snapshot_publish: tell those who watch the group that its state has changed; one gateway does it for all.
-- Keys:    group root
-- Args:    gateway
-- Answers: PUBLISHED again_ms sequence (told: something has changed, or nothing was told for five seconds) |
--          UNCHANGED again_ms sequence | WAIT again_ms 0 (another gateway does it); again_ms = when to call again
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: publisher, published, snapshot_channel, group, dead, endings, events, gateways, gateway, rotation, heads
-- Flags:   allow-oom
-- Cost:    linear in gateways; in pools only when something is told
-- Twice:   UNCHANGED, unless something has changed meanwhile
local faults = require("state.faults")
local group = require("state.group")
local names = require("lib.names")
local published = require("state.published")
local state = require("state.step")

local LOOK_MS = 200    -- a change is told within this
local ROLE_MS = 1000   -- a gateway that died is replaced after this
local REPEAT_MS = 5000 -- who has just come, or lost something, hears of the group within this

local function message(step, last, kinds, facts)
  facts.server_ms, facts.sequence, facts.pools = step.now, last.sequence + 1, #group.details(step.root).pools
  local changed = #kinds > 0 and cjson.encode(kinds) or "[]"
  return string.sub(cjson.encode(facts), 1, -2) .. ',"changed":' .. changed .. "}"
end

local function run(keys, args)
  local gateway = args[1]
  if not names.valid(gateway) then return faults.bad_argument("gateway", gateway, names.ALLOWED) end
  local held, left_ms = published.take_role(keys[1], gateway, ROLE_MS)
  if not held then return { "WAIT", left_ms, 0 } end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local marks, facts = published.look(step)
  local last = published.last(keys[1])
  local kinds = published.changed(marks, last.marks)
  -- A clock that was set back is no reason to be silent.
  if #kinds == 0 and step.now < last.at_ms + REPEAT_MS and step.now >= last.at_ms then
    return { "UNCHANGED", LOOK_MS, last.sequence }
  end
  published.tell(step, last, marks, message(step, last, kinds, facts))
  return { "PUBLISHED", LOOK_MS, last.sequence + 1 }
end

return { run = run }
