--- The line of pools that can be visited, and who leaves and rejoins it.
--
-- Policy drr: a zset by turn number; the lowest turn is being visited. Policy fifo: the zset `heads` by the sequence of
-- the pool's first request. A pool's place is
--   idle    nothing waits in it
--   line    it can be visited
--   parked  it was reached and could not launch (its cap, a pause, its endpoint); it keeps turn, deficit and open
--           visit and comes back at that turn. A parked pool costs nothing, a blocked one in the line 9 us a visit.
-- Pools below their protected minimum stand in the kept list as well, which is served first. An entry there is checked
-- when it is reached, so leaving needs no search.
local drr = require("lib.drr")
local endpoints = require("state.endpoints")
local keys = require("state.keys")
local passes = require("state.passes")
local pools = require("state.pools")
local queue = require("state.queue")

local rotation = {}

-- Pools below their minimum come back first: their rank among an endpoint's waiting pools is below every turn number.
local BELOW_MINIMUM = -2 ^ 50

local function fifo(step)
  return step.config.policy == "fifo"
end

local function line_key(step)
  return keys.of(step.root, fifo(step) and "heads" or "rotation")
end

-- Policy fifo: the arrival number of the pool's head. If that may have ended and hide an older one, 0: it is looked at.
local function rank(step, pool)
  if not fifo(step) then return pool.record.turn end
  if pool.record.tombstones > 0 and queue.mixed(pool) then return 0 end
  local head = queue.peek(step, pool)
  return head and head.seq or 0
end

local function waiting_rank(step, pool)
  local own = rank(step, pool)
  if rotation.below_minimum(step, pool) then return BELOW_MINIMUM + own end
  return own
end

local function take_turn(step)
  local turn = step.group.turn
  step.group.turn = turn + 1
  return turn
end

local function on_endpoint(record)
  return record.parked ~= nil and string.sub(record.parked, 1, 9) == "endpoint_"
end

--- Whether the pool has fewer running requests than its protected minimum (policy drr only).
function rotation.below_minimum(step, pool)
  local minimum = pool.config.min_concurrent or 0
  return minimum > pool.record.in_flight and not fifo(step)
end

--- Whether the pool runs as many requests as its own cap allows.
function rotation.at_cap(pool)
  local limit = pool.config.max_concurrent
  return limit ~= nil and pool.record.in_flight >= limit
end

--- Put the pool into the kept list if it may launch there.
function rotation.consider_kept(step, pool)
  local record = pool.record
  if record.kept or record.place ~= "line" or not rotation.below_minimum(step, pool) then return end
  server.call("RPUSH", keys.of(step.root, "kept"), pool.name)
  record.kept, step.group.kept = true, step.group.kept + 1
end

--- The pool has got backlog: it joins at the end of the line. Extends a pass that is under way.
function rotation.enter(step, pool)
  local record = pool.record
  record.place, record.turn, record.mark = "line", take_turn(step), step.group.round
  server.call("ZADD", line_key(step), rank(step, pool), pool.name)
  passes.extend(step)
  rotation.consider_kept(step, pool)
end

--- A parked pool comes back at its turn. Rounds that went by while it was away are not credited. `line` (a list): it is
-- put there, to line up with others.
function rotation.come_back(step, pool, line)
  local record = pool.record
  record.place, record.parked, record.mark = "line", nil, step.group.round
  record.reason, record.reason_since = nil, nil
  if line then
    line[#line + 1], line[#line + 2] = rank(step, pool), pool.name
  else
    server.call("ZADD", line_key(step), rank(step, pool), pool.name)
  end
  passes.restart(step)
  rotation.consider_kept(step, pool)
end

--- Bring back who may use room on this endpoint: all pools below their minimum, and the lowest turn alone.
function rotation.use_room(step, endpoint)
  if endpoint.record.waiting == 0 then return end
  local blocked, blocked_until = endpoints.block_reason(step, endpoint)
  if blocked_until then endpoints.look_again(step, endpoint, blocked_until) end
  if blocked then return end
  local waiting_key = keys.of(step.root, "waiting", endpoint.name)
  for _, name in ipairs(server.call("ZRANGE", waiting_key, "-inf", "(0", "BYSCORE")) do
    local pool = pools.get(step, name)
    endpoints.unpark(step, endpoint, name)
    if pool then rotation.come_back(step, pool) end
  end
  while not endpoint.record.holder do
    local name = endpoints.waiting(step, endpoint, 1)[1]
    if not name then return end
    local pool = pools.get(step, name)
    endpoints.unpark(step, endpoint, name)
    if pool then
      endpoint.record.holder = name
      rotation.come_back(step, pool)
    end
  end
end

-- The pool's turn on its endpoint is over: the next waiting one may come.
local function pass_endpoint_on(step, pool)
  local endpoint = endpoints.get(step, pool.config.endpoint)
  if endpoint.record.holder == pool.name then endpoint.record.holder = nil end
  rotation.use_room(step, endpoint)
end

--- The pool was reached and cannot launch for `reason`: it leaves the line and keeps what it has.
function rotation.park(step, pool, reason)
  local record = pool.record
  server.call("ZREM", line_key(step), pool.name)
  drr.collect(record, pool.config.quantum, step.group.round)
  record.place, record.parked = "parked", reason
  pools.skip(step, pool, reason)
  passes.restart(step)
  if on_endpoint(record) then
    local endpoint = endpoints.get(step, pool.config.endpoint)
    endpoints.park(step, endpoint, pool, waiting_rank(step, pool))
  end
  pass_endpoint_on(step, pool)
end

--- Nothing waits in the pool any more: it leaves, credit is forgotten, debt stays. Tombstones go with it: nobody would
-- come by to drop them, and requests cancelled while no gateway claims would pile up.
function rotation.leave(step, pool)
  local record = pool.record
  if record.place == "line" then
    server.call("ZREM", line_key(step), pool.name)
    drr.collect(record, pool.config.quantum, step.group.round)
  elseif on_endpoint(record) then
    endpoints.unpark(step, endpoints.get(step, pool.config.endpoint), pool.name)
  end
  drr.drop_credit(record)
  queue.rest(step, pool)
  record.place, record.parked, record.turn, record.head = "idle", nil, nil, nil
  record.reason, record.reason_since = nil, nil
  pass_endpoint_on(step, pool)
end

--- The visit is over: deficit clamped, next turn number, and the endpoint's turn is passed on.
function rotation.end_visit(step, pool)
  drr.close_visit(pool.record, step.config.cost_max)
  pool.record.turn = take_turn(step)
  server.call("ZADD", line_key(step), pool.record.turn, pool.name)
  pass_endpoint_on(step, pool)
end

--- Bring the line in order after a launch of `pool`: out if empty, to the end if its visit is over.
function rotation.after_launch(step, pool)
  passes.restart(step)
  local record = pool.record
  local head = record.depth > 0 and queue.peek(step, pool)
  if not head then
    rotation.leave(step, pool)
  elseif fifo(step) then
    server.call("ZADD", line_key(step), rank(step, pool), pool.name)
    pass_endpoint_on(step, pool)
  elseif record.open and drr.visit_over(record, rotation.units(step, head), pool.config.max_burst_per_visit) then
    rotation.end_visit(step, pool)
  end
end

--- What the entry counts for under the bounds that are in force now.
function rotation.units(step, head)
  local cost, config = head.cost, step.config
  if cost > config.cost_max then return config.cost_max end
  return cost < config.cost_min and config.cost_min or cost
end

--- A visit launched nothing because of credit alone.
function rotation.barren_visit(step, pool, head_cost, launchable)
  pools.skip(step, pool, "insufficient_credit")
  passes.note_barren(step, pool, head_cost, launchable)
  rotation.end_visit(step, pool)
end

--- The pool to visit, and its rank; nil when the line is empty. A name without a pool holds up all others, so it goes.
function rotation.first(step)
  while true do
    local found = server.call("ZRANGE", line_key(step), 0, 0, "WITHSCORES")
    if not found[1] then return nil end
    local pool = pools.get(step, found[1])
    if pool then return pool, tonumber(found[2]) end
    server.call("ZREM", line_key(step), found[1])
  end
end

--- The group is full and somebody asked for more: the pool at the front waits for its cap, or for protected pools that
-- the next free slot belongs to. Nothing moves and nothing is credited.
function rotation.note_full(step)
  local pool = rotation.first(step)
  if pool then pools.skip(step, pool, step.group.kept > 0 and "protected" or "global_capacity") end
end

--- How many pools stand in the line.
function rotation.length(step)
  return server.call("ZCARD", line_key(step))
end

--- Whether anybody stands in the line.
function rotation.anyone(step)
  return server.call("EXISTS", line_key(step)) == 1
end

--- The first pool of the kept list, or nil. A name without a pool goes.
function rotation.first_kept(step)
  if step.group.kept == 0 then return nil end
  local key = keys.of(step.root, "kept")
  while true do
    local name = server.call("LINDEX", key, 0)
    if not name then
      step.group.kept = 0
      return nil
    end
    local pool = pools.get(step, name)
    if pool then return pool end
    server.call("LPOP", key)
    step.group.kept = server.call("LLEN", key)
  end
end

--- The first pool of the kept list was served or does not belong there: to its end, or out.
function rotation.turn_kept(step, pool, stays)
  local key = keys.of(step.root, "kept")
  server.call("LPOP", key)
  if stays then
    server.call("RPUSH", key, pool.name)
  else
    pool.record.kept, step.group.kept = false, step.group.kept - 1
  end
end

--- Waiting work appeared in the pool (submitted, or given back).
function rotation.gained_work(step, pool)
  local record = pool.record
  if record.place == "idle" then
    rotation.enter(step, pool)
  elseif fifo(step) and (record.returned > 0 or queue.mixed(pool)) then
    -- A request that was given back may be older than the head that ranked the pool; a better level or another key may
    -- make a younger one the head.
    if record.place == "line" then
      server.call("ZADD", line_key(step), "LT", rank(step, pool), pool.name)
    elseif on_endpoint(record) then
      -- It may be older than the holder's, too: with room it does not wait for the holder's turn to end.
      local endpoint = endpoints.get(step, pool.config.endpoint)
      endpoints.unpark(step, endpoint, pool.name)
      if endpoints.block_reason(step, endpoint) then
        endpoints.park(step, endpoint, pool, waiting_rank(step, pool))
      else
        rotation.come_back(step, pool)
      end
    end
  end
end

--- Policy fifo: dead heads went, so the pool's place in the line may be another. True if it moved: then one that waits
-- for the same endpoint may be before it.
function rotation.rerank(step, pool, head)
  if not fifo(step) then return false end
  if server.call("ZADD", line_key(step), "CH", head.seq, pool.name) == 0 then return false end
  pass_endpoint_on(step, pool)
  return true
end

-- Policy fifo: the pool's head may be another, though it was not visited. In the line it is only moved to the front: a
-- younger head is found at the visit, which passes the endpoint's turn on as well.
local function head_changed(step, pool)
  if not fifo(step) then return end
  if pool.record.place == "line" then
    server.call("ZADD", line_key(step), "LT", rank(step, pool), pool.name)
  elseif on_endpoint(pool.record) then
    server.call("ZADD", keys.of(step.root, "waiting", pool.config.endpoint), rank(step, pool), pool.name)
  end
end

--- A request of the pool ended while it waited; nothing may be left, or another be the head.
function rotation.lost_work(step, pool)
  if pool.record.depth == 0 then
    if pool.record.place ~= "idle" then rotation.leave(step, pool) end
  elseif queue.mixed(pool) then
    head_changed(step, pool)
  end
end

--- A running request of the pool ended: slots of pool, endpoint and group are free. `was_blocked`: the pool's cap or
-- its endpoint was full until now, so pools that the pass did not ask may launch.
function rotation.freed_slot(step, pool, endpoint, was_blocked)
  local record = pool.record
  if was_blocked and not rotation.at_cap(pool) and not endpoints.block_reason(step, endpoint) then
    passes.restart(step)
  end
  if record.parked == "lane_capacity" then
    if not rotation.at_cap(pool) then rotation.come_back(step, pool) end
  elseif on_endpoint(record) then
    if rotation.below_minimum(step, pool) then
      server.call("ZADD", keys.of(step.root, "waiting", pool.config.endpoint), waiting_rank(step, pool), pool.name)
      rotation.use_room(step, endpoints.get(step, pool.config.endpoint))
    end
  else
    rotation.consider_kept(step, pool)
  end
  rotation.use_room(step, endpoint)
end

--- The pool pays or gets back `difference` for a request that has ended. Debt has no floor and stays when the pool is
-- empty; a refund to an empty pool only pays debt.
function rotation.settle_cost(step, pool, difference)
  local record = pool.record
  record.deficit = record.deficit - difference
  if record.place == "idle" then record.deficit = math.min(record.deficit, 0) end
  head_changed(step, pool)
  passes.restart(step)
end

--- Nothing of the pool may launch until it is resumed.
function rotation.pause(step, pool)
  if pool.record.place == "line" then rotation.park(step, pool, "paused") end
end

--- The pool may launch again.
function rotation.resume(step, pool)
  if pool.record.parked == "paused" then rotation.come_back(step, pool) end
end

--- Strike a pool that is removed off the kept list.
function rotation.strike(step, pool)
  local struck = server.call("LREM", keys.of(step.root, "kept"), 0, pool.name)
  step.group.kept = step.group.kept - struck
end

--- Take the pool out of every structure it could stand in, whatever its record says; its credit stays. For a repair.
function rotation.take_out(step, pool)
  for _, line in ipairs({ "rotation", "heads" }) do server.call("ZREM", keys.of(step.root, line), pool.name) end
  endpoints.unpark(step, endpoints.get(step, pool.config.endpoint), pool.name)
  rotation.strike(step, pool)
  pool.record.kept = false
end

--- Those whom `come_back` put into `line` join the line.
function rotation.line_up(step, line)
  if line[1] then server.call("ZADD", line_key(step), unpack(line)) end
end

--- Take the pool out of every structure; its credit stays. For a changed config, while the pool still has its old one.
-- What is placed anew in the same line may stand there until then.
function rotation.lift(step, pool, old_endpoint, old_policy)
  local record = pool.record
  if record.place == "line" then
    if record.depth == 0 or old_policy ~= step.config.policy then
      server.call("ZREM", keys.of(step.root, old_policy == "fifo" and "heads" or "rotation"), pool.name)
    end
    drr.collect(record, pool.config.quantum, step.group.round)
  elseif on_endpoint(record) then
    endpoints.unpark(step, endpoints.get(step, old_endpoint), pool.name)
  end
  local endpoint = endpoints.get(step, old_endpoint)
  if endpoint.record.holder == pool.name then endpoint.record.holder = nil end
  record.place, record.parked = "idle", nil
end

return rotation
