--- The cost rule: what one request counts for in its pool's deficit.
-- Explicit units win; else 1 + 2 x images + pages / 8, rounded up. Always clamped to the group's bounds.
local cost = {}

--- Bring `units` into low..high.
function cost.clamp(units, low, high)
  if units < low then return low end
  if units > high then return high end
  return units
end

--- Cost units of a request. `explicit` is nil when the producer gave none.
function cost.units(explicit, images, pages, config)
  local units = explicit or 1 + 2 * images + math.ceil(pages / 8)
  return cost.clamp(units, config.cost_min, config.cost_max)
end

return cost
