--- The group's own record: totals, counters of the scheduler, and the config that every call needs.
local keys = require("state.keys")
local packed = require("state.packed")
local schema = require("schema")

local group = {}

--- A record as it stands before the first call.
function group.new_record()
  return {
    in_flight = 0, queued = 0, -- running and waiting requests
    seq = 0,                   -- arrival order over the whole group
    turn = 0,                  -- next turn number of the rotation
    round = 0,                 -- virtual rounds so far
    fence = 0, frame = 0,      -- last fence token, last frame sequence
    kept = 0,                  -- length of the kept list
    sleepers = {},             -- gateways that wait for a wake token
    last_beat = 0, grace_until = 0,
  }
end

--- Load config and record, or nil when the group was never configured.
function group.load(root)
  local found = server.call("HMGET", keys.of(root, "group"), "config", "record")
  if not found[1] then return nil end
  return packed.read_config(found[1]), cmsgpack.unpack(found[2])
end

function group.save(root, record)
  server.call("HSET", keys.of(root, "group"), "record", cmsgpack.pack(record))
end

--- Everything else the group's hash holds: document, generation, actor, reason, changed_ms, names of pools, endpoints.
function group.details(root)
  local found = server.call("HMGET", keys.of(root, "group"),
    "document", "generation", "actor", "reason", "changed_ms", "pools", "endpoints", "nonce")
  return {
    document = found[1], generation = tonumber(found[2] or 0), actor = found[3] or "", reason = found[4] or "",
    changed_ms = tonumber(found[5] or 0), nonce = found[8],
    pools = found[6] and cmsgpack.unpack(found[6]) or {}, endpoints = found[7] and cmsgpack.unpack(found[7]) or {},
  }
end

--- Write a new generation and keep its document in the bounded history.
function group.save_generation(root, config, details)
  server.call("HSET", keys.of(root, "group"),
    "config", cmsgpack.pack(config), "document", details.document, "generation", details.generation,
    "actor", details.actor, "reason", details.reason, "changed_ms", details.changed_ms, "nonce", details.nonce,
    "pools", cmsgpack.pack(details.pools), "endpoints", cmsgpack.pack(details.endpoints))
  server.call("XADD", keys.of(root, "generations"), "MAXLEN", "~", schema.limits.generations_kept, "*",
    "generation", details.generation, "actor", details.actor, "reason", details.reason,
    "at_ms", details.changed_ms, "document", details.document)
end

return group
