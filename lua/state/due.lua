--- What came due: retries go back to their pools, endpoints that were blocked by time are looked at again.
local endpoints = require("state.endpoints")
local endings = require("state.endings")
local pools = require("state.pools")
local queue = require("state.queue")
local requests = require("state.requests")
local rotation = require("state.rotation")
local schema = require("schema")
local slots = require("state.slots")
local timers = require("state.timers")

local due = {}

local SHORTEST_SLEEP_MS = 1

-- The request goes back to where it stood in its pool.
local function retry(step, id)
  local request = requests.get(step, id)
  if not request or request.state ~= "delayed" then return end
  local pool = pools.get(step, request.pool)
  slots.undelay(step, request, true)
  if not pool then -- its record is damaged: nobody could ever claim it
    endings.finish(step, request, "failed", { error_type = "pool_unknown", error_message = "its pool is not there" })
    return
  end
  requests.requeue(step, request)
  queue.give_back(step, pool, request)
  rotation.gained_work(step, pool)
end

--- Do what is due, a bounded number. True if there was something.
function due.run(step)
  local members = timers.take(step, schema.limits.timers_max)
  for _, member in ipairs(members) do
    local kind, name = string.match(member, "^(%a+):(.*)$")
    if kind == "retry" then
      retry(step, name)
    elseif kind == "endpoint" then
      local endpoint = endpoints.get(step, name)
      endpoint.record.timer_at = nil
      rotation.use_room(step, endpoint)
    end
  end
  return #members > 0
end

--- How long a gateway may sleep: `longest`, or until the next thing is due.
function due.sleep_ms(step, longest)
  local at = step.group.next_timer
  if not at then return longest end
  return math.max(SHORTEST_SLEEP_MS, math.min(longest, at - step.now))
end

return due
