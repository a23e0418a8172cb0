--- What is told of the group's state on its channel: by one gateway for all, when it has changed.
--
-- The state is known by its marks, one for each kind of change, which cost little whatever the group holds: totals and
-- counters, the newest ending and event, how the pools stand, who the gateways are. Times and ages are in none, nor is
-- what an engine says of itself: that comes with the next snapshot.
local dead = require("state.dead")
local endings = require("state.endings")
local events = require("state.events")
local gateways = require("state.gateways")
local group = require("state.group")
local keys = require("state.keys")
local rotation = require("state.rotation")

local published = {}

-- Kinds of changes, in the order in which they are told.
local KINDS = { "requests", "pools", "endings", "events", "config", "gateways" }

--- The gateway publishes for the next `keep_ms`, unless another one does. Returns whether it does, and for how long the
-- other one still may.
function published.take_role(root, gateway, keep_ms)
  local key = keys.of(root, "publisher")
  local holder = server.call("GET", key)
  if holder and holder ~= gateway then return false, math.max(1, server.call("PTTL", key)) end
  server.call("SET", key, gateway, "PX", keep_ms)
  return true, keep_ms
end

--- How the group stands now: a text for each kind, and what is told with it.
function published.look(step)
  local record, root = step.group, step.root
  local died, generation = dead.count(step), group.generation_in_force(root)
  local ending, event = endings.newest(root), events.newest(root)
  local signs, live = gateways.signs(root)
  local marks = {
    requests = table.concat({ record.queued, record.in_flight, record.delayed or 0, record.seq, died }, " "),
    pools = table.concat({ rotation.length(step), record.kept }, " "),
    endings = ending, events = event, config = tostring(generation), gateways = signs,
  }
  return marks, {
    generation = generation, pending = record.queued, in_flight = record.in_flight, delayed = record.delayed or 0,
    dead = died, gateways = live, newest_ending_id = ending, newest_event_id = event,
  }
end

--- What was told last: sequence, when, and the marks as they were then.
function published.last(root)
  local found = server.call("HMGET", keys.of(root, "published"), "sequence", "at_ms", unpack(KINDS))
  local marks = {}
  for at, kind in ipairs(KINDS) do marks[kind] = found[at + 2] end
  return { sequence = tonumber(found[1] or 0), at_ms = tonumber(found[2] or 0), marks = marks }
end

--- Kinds of which `marks` say something else than `before`.
function published.changed(marks, before)
  local kinds = {}
  for _, kind in ipairs(KINDS) do
    if marks[kind] ~= before[kind] then kinds[#kinds + 1] = kind end
  end
  return kinds
end

--- Tell everybody who listens, and remember what was told.
function published.tell(step, last, marks, text)
  local cells = { "sequence", last.sequence + 1, "at_ms", step.now }
  for _, kind in ipairs(KINDS) do cells[#cells + 1], cells[#cells + 2] = kind, marks[kind] end
  server.call("HSET", keys.of(step.root, "published"), unpack(cells))
  server.call("PUBLISH", keys.of(step.root, "snapshot_channel"), text)
end

return published
