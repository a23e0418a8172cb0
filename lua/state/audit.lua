--- The parts of an audit: what the records say, beside what the structures hold. Reads only.
local endpoints = require("state.endpoints")
local entry = require("lib.entry")
local flows = require("state.flows")
local keys = require("state.keys")
local pages = require("lib.pages")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")

local audit = {}

--- The group's totals. How many wait is compared with the sum over the pools, by the caller.
function audit.group(step)
  local record = step.group
  return { rows = { {
    name = "group",
    stored = { in_flight = record.in_flight, kept = record.kept, queued = record.queued },
    counted = { in_flight = server.call("ZCARD", keys.of(step.root, "leases")),
      kept = server.call("LLEN", keys.of(step.root, "kept")) },
  } } }
end

-- Where the pool stands.
local function standing(step, pool)
  local fifo = step.config.policy == "fifo"
  local line = server.call("ZSCORE", keys.of(step.root, fifo and "heads" or "rotation"), pool.name)
  local other = server.call("ZSCORE", keys.of(step.root, fifo and "rotation" or "heads"), pool.name)
  local waiting = server.call("ZSCORE", keys.of(step.root, "waiting", pool.config.endpoint), pool.name)
  if other then return "line of the other policy" end
  if line and waiting then return "line and endpoint" end
  return line and "line" or waiting and "endpoint" or "none"
end

-- Where its record says that it stands.
local function told_standing(record)
  if record.place == "line" then return "line" end
  if record.place == "parked" and string.sub(record.parked or "", 1, 9) == "endpoint_" then return "endpoint" end
  return "none"
end

--- Records of pools. `awake`: a pool with waiting work has a place, one without has none. What the pool's entries say
-- (depth, bytes, tombstones, levels) is compared by the caller.
function audit.pools(step, details, page)
  local names, cursor = pages.part(details.pools, page.cursor, page.limit)
  local rows = {}
  for at, name in ipairs(names) do
    local pool = pools.get(step, name)
    local record = pool and pool.record
    rows[at] = not pool and { name = name, stored = { record = "missing" }, counted = { record = "expected" } } or {
      name = name,
      stored = { entries = queue.length(pool), returned = record.returned, standing = told_standing(record),
        idle_keys = record.idle_keys or 0, awake = record.place ~= "idle", depth = record.depth, bytes = record.bytes,
        tombstones = record.tombstones, in_flight = record.in_flight, level_0 = record.levels[1],
        level_1 = record.levels[2], level_2 = record.levels[3], level_3 = record.levels[4] },
      counted = { entries = flows.count(pool) + record.returned, standing = standing(step, pool),
        returned = server.call("ZCARD", keys.of(step.root, "returned", name)),
        idle_keys = flows.idle_count(step, pool), awake = record.depth > 0 },
    }
  end
  return { rows = rows, cursor = cursor }
end

-- The pool that has its turn on the endpoint, "none" when it stands in no line: nobody would ever pass the turn on.
local function true_holder(step, endpoint)
  local name = endpoint.record.holder
  local pool = name and pools.get(step, name)
  return pool and pool.record.place == "line" and pool.config.endpoint == endpoint.name and name or "none"
end

--- Records of endpoints.
function audit.endpoints(step, details, page)
  local names, cursor = pages.part(details.endpoints, page.cursor, page.limit)
  local rows = {}
  for at, name in ipairs(names) do
    local endpoint = endpoints.get(step, name)
    local record = endpoint.record
    rows[at] = { name = name,
      stored = { waiting = record.waiting, in_flight = record.in_flight, holder = record.holder or "none" },
      counted = { waiting = server.call("ZCARD", keys.of(step.root, "waiting", name)),
        holder = true_holder(step, endpoint) } }
  end
  return { rows = rows, cursor = cursor }
end

--- The entries of the pool `subject`: how many are live, their bytes, and how many each level's lists hold.
function audit.entries(step, _, page)
  local found = { entries = 0, live = 0, tombstones = 0, foreign = 0, bytes = 0, level_0 = 0, level_1 = 0,
    level_2 = 0, level_3 = 0 }
  local pool = pools.get(step, page.subject)
  if not pool then return found end
  local entries, cursor = queue.page(step, pool, page.cursor, page.limit)
  for _, each in ipairs(entries) do
    local item = entry.decode(each.text)
    found.entries = found.entries + 1
    if item.seq == 0 then
      found.foreign = found.foreign + 1
    else
      local level = each.level and "level_" .. each.level
      if level then found[level] = found[level] + 1 end
      local request = requests.get(step, item.id)
      if request and request.state == "queued" and request.seq == item.seq then
        found.live, found.bytes = found.live + 1, found.bytes + item.bytes
      else
        found.tombstones = found.tombstones + 1
      end
    end
  end
  found.cursor = cursor
  return found
end

local function count(counts, name)
  counts[name] = (counts[name] or 0) + 1
end

--- Leases, counted by what they hold.
function audit.leases(step, _, page)
  local from = tonumber(page.cursor) or 0
  local ids = server.call("ZRANGE", keys.of(step.root, "leases"), from, from + page.limit - 1)
  local by_pool, by_endpoint, by_gateway, broken = {}, {}, {}, {}
  for _, id in ipairs(ids) do
    local request = requests.get(step, id)
    if not request or request.state ~= "leased" then
      broken[#broken + 1] = id
    else
      count(by_pool, request.pool)
      count(by_endpoint, request.endpoint)
      count(by_gateway, request.gateway)
    end
  end
  -- An empty Lua table would become a list or an object as it likes: absent then.
  return {
    leases = #ids, pools = next(by_pool) and by_pool, endpoints = next(by_endpoint) and by_endpoint,
    gateways = next(by_gateway) and by_gateway, broken = #broken > 0 and broken or nil,
    cursor = #ids == page.limit and tostring(from + page.limit) or "",
  }
end

return audit
