--- Consumer groups on the streams of records: made when they are missing, and held against what was trimmed unread.
local keys = require("state.keys")

local readers = {}

--- The streams that are read so.
readers.STREAMS = { "endings", "deliveries" }

local function as_table(flat)
  local found = {}
  for at = 1, #flat, 2 do found[flat[at]] = flat[at + 1] end
  return found
end

local function split(id)
  local ms, number = string.match(id, "^(%d+)-(%d+)$")
  return tonumber(ms), tonumber(number)
end

local function is_later(id, other)
  local ms, number = split(id)
  local other_ms, other_number = split(other)
  return ms > other_ms or (ms == other_ms and number > other_number)
end

local function entry_id(entry)
  return entry and entry[1] or nil
end

-- The state of a stream; nil when it is not there.
local function look(key)
  if server.call("EXISTS", key) == 0 then return nil end
  local about = as_table(server.call("XINFO", "STREAM", key))
  return { length = about["length"], added = about["entries-added"], last = about["last-generated-id"],
    first = entry_id(about["first-entry"]) }
end

local function find(key, name)
  for _, flat in ipairs(server.call("XINFO", "GROUPS", key)) do
    local about = as_table(flat)
    if about["name"] == name then
      return { at = about["last-delivered-id"], read = about["entries-read"] or nil, pending = about["pending"] }
    end
  end
  return nil
end

-- Make the consumer group `name`, to read all that is there.
local function make(key, name, state)
  local trimmed = state and state.added - state.length or 0 -- before anybody wanted to read: not lost
  server.call("XGROUP", "CREATE", key, name, "0", "MKSTREAM", "ENTRIESREAD", trimmed)
end

-- The id before this one: a group that stands there reads it next.
local function before(id)
  local ms, number = split(id)
  if number > 0 then return string.format("%.0f-%.0f", ms, number - 1) end
  return string.format("%.0f-18446744073709551615", ms - 1)
end

-- Let a group go on behind what was trimmed before it read it. Returns how many that were.
local function skip_trimmed(key, name, state, group)
  if not group.read then return 0 end
  local unread, lost = state.added - group.read, 0
  if state.first and is_later(state.first, group.at) and unread > state.length then
    lost = unread - state.length
    group.at, group.read = before(state.first), state.added - state.length
  elseif unread > 0 and not is_later(state.last, group.at) then -- read to the end, past what was trimmed meanwhile
    lost, group.read = unread, state.added
  end
  if lost > 0 then server.call("XGROUP", "SETID", key, name, group.at, "ENTRIESREAD", group.read) end
  return lost
end

--- How a stream and the group `name` on it stand (nil when there is no such stream), and how many records were trimmed
-- before that group read them. `prepare`: it is made where it is missing, and goes on behind those; else 0 are counted.
function readers.watch(root, stream, name, prepare)
  local key = keys.of(root, stream)
  local state = look(key)
  local group = state and find(key, name)
  if prepare and not group then
    make(key, name, state)
    state, group = look(key), find(key, name)
  end
  if not group then return state, 0 end
  local lost = prepare and skip_trimmed(key, name, state, group) or 0
  state.read, state.at, state.pending = group.read, group.at, group.pending
  state.lag = group.read and math.max(0, state.added - group.read)
  return state, lost
end

-- The time in a stream's id; nil for the id before all others.
local function time_of(id)
  local ms = id and split(id)
  return ms and ms > 0 and ms or nil
end

--- All readers of the endings, as rows: how many each was not handed (`lag`, nil when the server cannot tell), the time
-- of the last it was handed, and how many it was handed and did not confirm (`taken`), with the time of the oldest.
function readers.rows(root)
  local key, rows = keys.of(root, "endings"), {}
  if server.call("EXISTS", key) == 0 then return rows end
  for at, flat in ipairs(server.call("XINFO", "GROUPS", key)) do
    local about = as_table(flat)
    local oldest = about["pending"] > 0 and server.call("XPENDING", key, about["name"])[2]
    rows[at] = { name = about["name"], consumers = about["consumers"], lag = about["lag"] or nil,
      last_ms = time_of(about["last-delivered-id"]), taken = about["pending"], oldest_taken_ms = time_of(oldest) }
  end
  return rows
end

return readers
