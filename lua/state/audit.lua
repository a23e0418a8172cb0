--- The parts of an audit: what the records say, beside what the structures hold. Reads only.
local breaker = require("lib.breaker")
local dead = require("state.dead")
local endpoints = require("state.endpoints")
local entry = require("lib.entry")
local flows = require("state.flows")
local gate = require("lib.gate")
local keys = require("state.keys")
local pages = require("lib.pages")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")

local audit = { parts = {} }
local parts = audit.parts

-- The score of the first member of a set of times, "none" when it is empty.
local function first_due(step, name)
  local found = server.call("ZRANGE", keys.of(step.root, name), 0, 0, "WITHSCORES")
  return found[2] and tonumber(found[2]) or "none"
end

-- `next_timer` may be early (a timer was cleared): then nothing is found at that time. Late is wrong.
local function true_next_timer(step)
  local stored, first = step.group.next_timer or "none", first_due(step, "timers")
  if first == "none" or (stored ~= "none" and stored <= first) then return stored end
  return first
end

--- The group's totals. How many wait is compared with the sum over the pools, by the caller.
function parts.group(step)
  local record = step.group
  return { rows = { {
    name = "group",
    stored = { in_flight = record.in_flight, kept = record.kept, queued = record.queued,
      delayed = record.delayed or 0, next_timer = record.next_timer or "none",
      next_chore = record.next_chore or "none" },
    counted = { in_flight = server.call("ZCARD", keys.of(step.root, "leases")),
      kept = server.call("LLEN", keys.of(step.root, "kept")), next_timer = true_next_timer(step),
      next_chore = first_due(step, "chores") },
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
function parts.pools(step, details, page)
  local names, cursor = pages.part(details.pools, page.cursor, page.limit)
  local rows = {}
  for at, name in ipairs(names) do
    local pool = pools.get(step, name)
    local record = pool and pool.record
    rows[at] = not pool and { name = name, stored = { record = "missing" }, counted = { record = "expected" } } or {
      name = name,
      stored = { entries = queue.length(pool), returned = record.returned, standing = told_standing(record),
        idle_keys = record.idle_keys or 0, awake = record.place ~= "idle", depth = record.depth, bytes = record.bytes,
        tombstones = record.tombstones, in_flight = record.in_flight, delayed = record.delayed or 0,
        level_0 = record.levels[1],
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

-- The request that is the probe of the endpoint's breaker, as its record says and as it is; "none" when there is none
-- or its time is over.
local function probes(step, endpoint)
  local record = endpoint.record
  local probe = breaker.probing(record, step.now) and record.probe
  if not probe or probe.id == "" then return "none", "none" end
  local request = requests.get(step, probe.id)
  return probe.id, request and request.state == "leased" and request.fence == probe.fence and probe.id or "none"
end

-- When the endpoint is to be looked at again: as its record says, and as the timers have it.
local function looks(step, endpoint)
  local stored = endpoint.record.timer_at
  if not stored then return "none", "none" end
  local due = server.call("ZSCORE", keys.of(step.root, "timers"), "endpoint:" .. endpoint.name)
  return stored, due and tonumber(due) or "none"
end

local function is_chore(step, kind, name)
  return server.call("ZSCORE", keys.of(step.root, "chores"), kind .. ":" .. name) ~= false
end

--- Whether somebody is to ask the endpoint if it is back.
function audit.wants_asking(endpoint)
  return endpoint.record.breaker ~= nil and endpoint.config.probe_timeout_ms ~= nil
end

--- Records of endpoints. `asked` and `sampled`: whether a gateway is to ask it if it is back, and for its metrics.
function parts.endpoints(step, details, page)
  local names, cursor = pages.part(details.endpoints, page.cursor, page.limit)
  local rows = {}
  for at, name in ipairs(names) do
    local endpoint = endpoints.get(step, name)
    local record = endpoint.record
    local told_probe, true_probe = probes(step, endpoint)
    local told_look, true_look = looks(step, endpoint)
    rows[at] = { name = name,
      stored = { waiting = record.waiting, in_flight = record.in_flight, holder = record.holder or "none",
        probe = told_probe, look = told_look, asked = audit.wants_asking(endpoint),
        sampled = gate.configured(endpoint.config) },
      counted = { waiting = server.call("ZCARD", keys.of(step.root, "waiting", name)),
        holder = true_holder(step, endpoint), probe = true_probe, look = true_look,
        asked = is_chore(step, "probe", name), sampled = is_chore(step, "sample", name) } }
  end
  return { rows = rows, cursor = cursor }
end

--- The entries of the pool `subject`: how many are live, their bytes, and how many each level's lists hold.
function parts.entries(step, _, page)
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
function parts.leases(step, _, page)
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
  return { -- an empty Lua table would become a list or an object as it likes: absent then
    leases = #ids, pools = next(by_pool) and by_pool, endpoints = next(by_endpoint) and by_endpoint,
    gateways = next(by_gateway) and by_gateway, broken = #broken > 0 and broken or nil,
    cursor = #ids == page.limit and tostring(from + page.limit) or "",
  }
end

--- The set of endpoints that are configured.
function audit.named_endpoints(details)
  local named = {}
  for _, name in ipairs(details.endpoints) do named[name] = true end
  return named
end

--- Whether what a timer is for is there; and the request, if it is for one that waits for its next attempt.
function audit.timer_is_needed(step, named, member)
  local kind, name = string.match(member, "^(%a+):(.*)$")
  if kind == "endpoint" then return named[name] == true end
  local request = kind == "retry" and requests.get(step, name)
  if request and request.state == "delayed" then return true, request end
  return false
end

--- Whether what a chore is for is there.
function audit.chore_is_needed(named, member)
  local kind, name = string.match(member, "^(%a+):(.*)$")
  return (kind == "probe" or kind == "sample") and named[name] == true
end

local function members(step, name, page)
  local from = tonumber(page.cursor) or 0
  local found = server.call("ZRANGE", keys.of(step.root, name), from, from + page.limit - 1)
  return found, #found == page.limit and tostring(from + page.limit) or ""
end

-- An empty Lua table would become a list or an object as it likes: absent then.
local function if_any(found)
  return next(found) and found or nil
end

--- Timers: those of requests that wait for their next attempt (`delayed`: pool by request), and those that are for
-- nothing that is there.
function parts.timers(step, details, page)
  local named, delayed, stray = audit.named_endpoints(details), {}, {}
  local found, cursor = members(step, "timers", page)
  for _, member in ipairs(found) do
    local needed, request = audit.timer_is_needed(step, named, member)
    if request then
      delayed[request.id] = request.pool
    elseif not needed then
      stray[#stray + 1] = member
    end
  end
  return { delayed = if_any(delayed), stray = if_any(stray), cursor = cursor }
end

--- Chores that are for nothing that is there.
function parts.chores(step, details, page)
  local named, stray = audit.named_endpoints(details), {}
  local found, cursor = members(step, "chores", page)
  for _, member in ipairs(found) do
    if not audit.chore_is_needed(named, member) then stray[#stray + 1] = member end
  end
  return { stray = if_any(stray), cursor = cursor }
end

--- Requests that have not ended: those that wait for their next attempt (`delayed`: pool by request), and which of them
-- have no timer.
function parts.requests(step, _, page)
  local delayed, untimed = {}, {}
  local found, cursor = members(step, "deadlines", page)
  for _, id in ipairs(found) do
    local request = requests.is_delayed(step, id) and requests.get(step, id)
    if request then
      delayed[id] = request.pool
      if not server.call("ZSCORE", keys.of(step.root, "timers"), "retry:" .. id) then untimed[#untimed + 1] = id end
    end
  end
  return { delayed = if_any(delayed), untimed = if_any(untimed), cursor = cursor }
end

--- Members of the dead list of which nothing is kept, though their time is not over.
function parts.dead(step, _, page)
  local broken = {}
  local found, cursor = dead.page(step.root, page.cursor, page.limit)
  for _, member in ipairs(found) do
    if member.died_ms > step.now - step.config.dead_ttl_ms and not dead.find(step, member.id) then
      broken[#broken + 1] = member.id
    end
  end
  return { broken = if_any(broken), cursor = cursor }
end

return audit
