--- Deficit Round Robin: credit, visits and virtual rounds of one pool record. Pure arithmetic.
--
-- Origin: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin". Here a visit is stored, so that
-- it goes on across claims of any size; pools that cannot launch are parked outside the rotation (state/rotation.lua);
-- and rounds in which nobody can afford its head are added at once ("virtual rounds") instead of being walked.
--
-- A pool record has: deficit, mark (round counter at its last touch), open (a visit is open), launches (in that visit).
-- M = the group's greatest cost. Costs and quanta are whole numbers.
--
-- Bound, for two pools with backlog and no cap, over every window and any number of gateways:
--   |service_i / q_i - service_j / q_j| <= 1 + (M - 1) (1/q_i + 1/q_j)
local drr = {}

--- Collect the virtual rounds that went by since the last touch: at a visit, and when the pool leaves the line.
function drr.collect(pool, quantum, round)
  if round > pool.mark then pool.deficit = pool.deficit + quantum * (round - pool.mark) end
  pool.mark = round
end

--- Collect what is due, and open a visit if none is: one quantum a visit.
function drr.touch(pool, quantum, round)
  drr.collect(pool, quantum, round)
  if not pool.open then
    pool.open, pool.launches = true, 0
    pool.deficit = pool.deficit + quantum
  end
end

--- Whether a visit now would launch a head of this cost: what `touch` and `visit_over` will come to.
function drr.can_pay(pool, config, head_cost, round)
  local burst = config.max_burst_per_visit
  local deficit = pool.deficit + config.quantum * math.max(0, round - pool.mark)
  if not pool.open then return head_cost <= deficit + config.quantum end
  return head_cost <= deficit and (burst == nil or pool.launches < burst)
end

--- Whether the open visit is over: the head costs more than the deficit, or the burst is used up.
function drr.visit_over(pool, head_cost, burst)
  return head_cost > pool.deficit or (burst ~= nil and pool.launches >= burst)
end

--- Close the visit; credit is kept, but never more than one greatest request.
function drr.close_visit(pool, greatest)
  pool.open, pool.launches = false, 0
  if pool.deficit > greatest then pool.deficit = greatest end
end

--- Charge a launch of the open visit.
function drr.charge(pool, units)
  pool.deficit = pool.deficit - units
  pool.launches = pool.launches + 1
end

--- Charge a launch on a protected slot: needs no credit, takes the deficit no lower than -M.
function drr.charge_protected(pool, units, greatest)
  local floor = math.min(pool.deficit, -greatest)
  pool.deficit = math.max(pool.deficit - units, floor)
end

--- Visits the pool needs from now until it can afford its head.
function drr.visits_needed(pool, head_cost, quantum)
  return math.max(1, math.ceil((head_cost - pool.deficit) / quantum))
end

--- Forget credit when the backlog is gone; debt stays.
function drr.drop_credit(pool)
  if pool.deficit > 0 then pool.deficit = 0 end
  pool.open, pool.launches = false, 0
end

return drr
