--- reply_append: send chunks of running streams to their producers, and learn which streams nobody wants any more.
-- Keys:    group root
-- Args:    gateway, count, then per item: request_id fence number (of the first chunk in it, from 0) chunks payload
-- Answers: a word per item: OK | LEASE_LOST | PRODUCER_GONE | SLOW_CONSUMER (it has too much to take already, or the
--          stream is too long) | CANCELLED | GAP (chunks before it are missing); but for OK nothing was sent
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, request, leases, alive, replies, reply_bytes, wake_producer
-- Flags:   allow-oom
-- Cost:    linear in count; payloads cross Lua
-- Twice:   OK, and nothing is sent again: chunks are known by their number
local faults = require("state.faults")
local leases = require("state.leases")
local producers = require("state.producers")
local replies = require("state.replies")
local requests = require("state.requests")
local schema = require("schema")
local state = require("state.step")

local FIRST_ITEM, ITEM_LENGTH = 2, 5

local function append(step, gateway, item, lease_end)
  local request = requests.get(step, item.id)
  if not leases.held(step, gateway, item, request, lease_end) then return "LEASE_LOST" end
  local sent, bytes, first_ms = requests.streamed(request)
  if item.number + item.chunks <= sent then return "OK" end
  if item.number ~= sent then return "GAP" end
  if request.cancel then return "CANCELLED" end
  if not producers.alive(step, request.producer) then return "PRODUCER_GONE" end
  if bytes + #item.payload > step.config.max_stream_bytes
    or replies.backlog(step, request.producer) + #item.payload > step.config.max_stream_backlog_bytes then
    return "SLOW_CONSUMER"
  end
  replies.push_chunks(step, request, item.number, item.payload)
  requests.note_stream(step, request, sent + item.chunks, bytes + #item.payload, first_ms or step.now)
  return "OK"
end

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local count = tonumber(args[2])
  if not count or count < 1 or count > schema.limits.append_max or #args ~= FIRST_ITEM + count * ITEM_LENGTH then
    return faults.bad_argument("count", args[2],
      "1 to " .. schema.limits.append_max .. ", with " .. ITEM_LENGTH .. " arguments each")
  end
  local items, ids = {}, {}
  for index = 1, count do
    local at = FIRST_ITEM + (index - 1) * ITEM_LENGTH
    items[index] = { id = args[at + 1], fence = tonumber(args[at + 2]), number = tonumber(args[at + 3]),
      chunks = tonumber(args[at + 4]), payload = args[at + 5] }
    ids[index] = items[index].id
    if not items[index].number or not items[index].chunks or items[index].chunks < 1 then
      local shown = args[at + 3] .. ", " .. args[at + 4]
      return faults.bad_argument("number, chunks", shown, "whole numbers, chunks from 1")
    end
  end
  local words, ends = {}, leases.ends(step, ids)
  for index, item in ipairs(items) do words[index] = append(step, args[1], item, ends[index]) end
  state.save(step)
  return words
end

return { run = run }
