--- Leases: which request is held until when, and by which gateway. The number of members is the number in flight.
local keys = require("state.keys")
local producers = require("state.producers")

local leases = {}

-- Lua's unpack fails from about 8,000 values.
local CHUNK = 1000

local function in_chunks(list, visit)
  for from = 1, #list, CHUNK do
    local part = {}
    for at = from, math.min(#list, from + CHUNK - 1) do part[#part + 1] = list[at] end
    visit(part)
  end
end

--- Add the leases a claim made. One write for all.
function leases.add(step, gateway, requests)
  if #requests == 0 then return end
  local scored, ids = {}, {}
  local ends = step.now + step.config.lease_ms
  for at, request in ipairs(requests) do
    scored[2 * at - 1], scored[2 * at] = ends, request.id
    ids[at] = request.id
  end
  server.call("ZADD", keys.of(step.root, "leases"), unpack(scored))
  server.call("SADD", keys.of(step.root, "holding", gateway), unpack(ids))
end

--- Remove leases of one gateway.
function leases.remove(step, gateway, ids)
  if #ids == 0 then return end
  server.call("ZREM", keys.of(step.root, "leases"), unpack(ids))
  server.call("SREM", keys.of(step.root, "holding", gateway), unpack(ids))
end

--- Ends of the leases of `ids` (as many as one call settles or claims), ms; false where there is none.
function leases.ends(step, ids)
  if #ids == 0 then return {} end
  local ends = server.call("ZMSCORE", keys.of(step.root, "leases"), unpack(ids))
  for at, score in ipairs(ends) do ends[at] = score and tonumber(score) end
  return ends
end

--- Whether the gateway still holds the lease that `item` names: same fence, and not run out (after an outage that is
-- not held against it). A lease that is in no index was taken out by others: who takes it out here ends it in the
-- same step.
function leases.held(step, gateway, item, request, lease_end)
  return request ~= nil and request.state == "leased" and request.gateway == gateway and request.fence == item.fence
    and (not lease_end or lease_end >= step.now or producers.in_grace(step))
end

--- Renew leases by the full lease time. One that fell out of the index comes back to it: its request is the proof.
function leases.renew(step, ids)
  in_chunks(ids, function(part)
    local scored = {}
    for at, id in ipairs(part) do
      scored[2 * at - 1], scored[2 * at] = step.now + step.config.lease_ms, id
    end
    server.call("ZADD", keys.of(step.root, "leases"), unpack(scored))
  end)
end

--- Ids whose lease has ended, at most `limit`.
function leases.expired(step, limit)
  return server.call("ZRANGE", keys.of(step.root, "leases"), "-inf", "(" .. step.now, "BYSCORE", "LIMIT", 0, limit)
end

--- Ids of leases, the first `limit` to end.
function leases.first(step, limit)
  return server.call("ZRANGE", keys.of(step.root, "leases"), 0, limit - 1)
end

--- Forget a lease whose request is not there any more.
function leases.forget(step, id)
  server.call("ZREM", keys.of(step.root, "leases"), id)
end

--- Forget ids in a gateway's set that are no leases of it (any more).
function leases.forget_held(step, gateway, ids)
  if #ids > 0 then server.call("SREM", keys.of(step.root, "holding", gateway), unpack(ids)) end
end

--- What the server thinks this gateway holds.
function leases.held_by(step, gateway)
  return server.call("SMEMBERS", keys.of(step.root, "holding", gateway))
end

return leases
