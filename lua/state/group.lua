--- The group's own record: totals, counters of the scheduler, and the config that every call needs.
local keys = require("state.keys")
local packed = require("state.packed")
local schema = require("schema")

local FIELDS = require("lib.config").FIELDS.group

local layout = require("records").group

local group = {}

--- A record as it stands before the first call.
function group.new_record()
  return {
    in_flight = 0, queued = 0, delayed = 0, -- running requests, waiting ones, those that wait for their next attempt
    seq = 0,                   -- arrival order over the whole group
    turn = 0,                  -- next turn number of the rotation
    round = 0,                 -- virtual rounds so far
    fence = 0, frame = 0,      -- last fence token, last frame sequence
    kept = 0,                  -- length of the kept list
    sleepers = {},             -- gateways that wait for a wake token
    last_beat = 0, grace_until = 0,
    budget_start = 0, budget_first = 0, budget_retries = 0, -- lib/retry.lua
    budget_first_before = 0, budget_retries_before = 0,
    -- absent when unset: next_timer (state/timers.lua), next_chore (state/chores.lua)
  }
end

--- Load config and record, or nil when the group was never configured.
function group.load(root)
  local found = server.call("HMGET", keys.of(root, "group"), "config", "record")
  if not found[1] then return nil end
  return packed.read_config(found[1], FIELDS), layout.decode(found[2])
end

--- Write the record back. It is used up.
function group.save(root, record)
  server.call("HSET", keys.of(root, "group"), "record", layout.encode(record))
end

--- What else the group's hash holds, but for the document: generation, actor, reason, changed_ms, nonce, names of pools
-- and endpoints.
function group.details(root)
  local found = server.call("HMGET", keys.of(root, "group"),
    "generation", "actor", "reason", "changed_ms", "pools", "endpoints", "nonce")
  return {
    generation = tonumber(found[1] or 0), actor = found[2] or "", reason = found[3] or "",
    changed_ms = tonumber(found[4] or 0), nonce = found[7],
    pools = found[5] and cmsgpack.unpack(found[5]) or {}, endpoints = found[6] and cmsgpack.unpack(found[6]) or {},
  }
end

--- The number of the config in force.
function group.generation_in_force(root)
  return tonumber(server.call("HGET", keys.of(root, "group"), "generation") or 0)
end

--- The document in force, as JSON, or nil. It can be large.
function group.document(root)
  return server.call("HGET", keys.of(root, "group"), "document") or nil
end

--- Write a new generation and keep it in the bounded history, under its own number as the stream's id. `details` also
-- has its `changes` to the one before (JSON text) and their count `changed`.
function group.save_generation(root, config, details)
  server.call("HSET", keys.of(root, "group"),
    "config", cmsgpack.pack(config), "document", details.document, "generation", details.generation,
    "actor", details.actor, "reason", details.reason, "changed_ms", details.changed_ms, "nonce", details.nonce,
    "pools", cmsgpack.pack(details.pools), "endpoints", cmsgpack.pack(details.endpoints))
  local history = keys.of(root, "generations")
  -- A first generation beside an older history: the group's hash was deleted, and numbers start again.
  if details.generation == 1 then server.call("DEL", history) end
  server.call("XADD", history, "MAXLEN", "~", schema.limits.generations_kept, details.generation .. "-0",
    "actor", details.actor, "reason", details.reason, "changed_ms", details.changed_ms,
    "changed", details.changed, "changes", details.changes, "document", details.document)
end

local function read_generation(entry)
  local found = { generation = tonumber(string.match(entry[1], "^%d+")) }
  for at = 1, #entry[2], 2 do found[entry[2][at]] = entry[2][at + 1] end
  found.changed_ms, found.changed = tonumber(found.changed_ms), tonumber(found.changed)
  return found
end

--- One generation of the history (`changes` and `document` are JSON texts), or nil when it is not kept (any more).
function group.generation(root, number)
  local id = string.format("%.0f-0", number)
  local entry = server.call("XRANGE", keys.of(root, "generations"), id, id)[1]
  return entry and read_generation(entry)
end

--- The newest generation below `number` (nil = the newest of all), or nil. One at a time: documents can be large.
function group.generation_before(root, number)
  local from = number and string.format("(%.0f-0", number) or "+"
  local entry = server.call("XREVRANGE", keys.of(root, "generations"), from, "-", "COUNT", 1)[1]
  return entry and read_generation(entry)
end

return group
