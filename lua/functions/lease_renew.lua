--- lease_renew: a gateway's heartbeat: register, renew all leases it names, tell it what it does not know.
-- Keys:    group root
-- Args:    gateway, host, pid, version, slots, started_ms, draining(0|1), nonce_count, nonces of calls whose answer is
--          outstanding, held_count, then per lease: request_id fence
-- Answers: server_ms generation chore_ms, lost_count ids, cancelled_count ids, rows (as lease_claim) of leases that it
--          did not name
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   queued -> ended, leased -> ended, delayed -> queued, delayed -> ended
-- Touches: group, gateway, gateways, leases, holding, request, request_body, requests, returned, deadlines, pool,
--          endpoint, rotation, heads, kept, waiting, alive, replies, wake, wake_producer, endings,
--          timers, chores, events, idempotency, result
-- Flags:   allow-oom
-- Cost:    linear in the leases held, plus a bounded number of passed deadlines
-- Twice:   renews again; same answer
local admission = require("state.admission")
local chores = require("state.chores")
local due = require("state.due")
local faults = require("state.faults")
local gateways = require("state.gateways")
local leases = require("state.leases")
local producers = require("state.producers")
local reaping = require("state.reaping")
local requests = require("state.requests")
local rotation = require("state.rotation")
local schema = require("schema")
local state = require("state.step")
local wake = require("state.wake")

local DEADLINES_PER_BEAT = 50

-- Sort the named leases into those that are renewed, lost, and asked to stop.
local function review(step, held)
  local renewed, lost, cancelled, ids = {}, {}, {}, {}
  for index, lease in ipairs(held) do ids[index] = lease.id end
  local ends = leases.ends(step, ids)
  local grace = producers.in_grace(step)
  for index, lease in ipairs(held) do
    local ended = ends[index] and ends[index] < step.now and not grace
    local current = not ended and requests.get(step, lease.id)
    if not current or current.state ~= "leased" or current.fence ~= lease.fence then
      lost[#lost + 1] = lease.id
    else
      renewed[#renewed + 1] = lease.id
      if current.cancel then cancelled[#cancelled + 1] = lease.id end
    end
  end
  return renewed, lost, cancelled
end

-- Leases the server holds for this gateway that it did not name, unless their claim's answer is still on its way.
local function unknown(step, gateway, held, nonces)
  local named, rows, stale = {}, {}, {}
  for _, lease in ipairs(held) do named[lease.id] = true end
  for _, id in ipairs(leases.held_by(step, gateway)) do
    if not named[id] and #rows < schema.limits.claim_max then
      local request = requests.get_whole(step, id)
      if not request or request.state ~= "leased" or request.gateway ~= gateway then
        stale[#stale + 1] = id
      elseif not nonces[request.claim_nonce] then
        request.lease_until = step.now + step.config.lease_ms
        rows[#rows + 1] = request
      end
    end
  end
  leases.forget_held(step, gateway, stale)
  return rows
end

local function run(keys, args)
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local gateway, nonce_count = args[1], tonumber(args[8])
  local held_at = nonce_count and 9 + nonce_count
  local held_count = held_at and tonumber(args[held_at] or "")
  if not held_count or held_count > schema.limits.renew_max or #args ~= held_at + 2 * held_count then
    local allowed = "at most " .. schema.limits.renew_max .. ", two arguments each"
    return faults.bad_argument("held_count", args[held_at or 9], allowed)
  end
  local nonces, held = {}, {}
  for index = 1, nonce_count do nonces[args[8 + index]] = true end
  for index = 1, held_count do
    held[index] = { id = args[held_at + 2 * index - 1], fence = tonumber(args[held_at + 2 * index]) }
  end

  producers.in_grace(step) -- judged before this heartbeat counts
  step.group.last_beat = step.now
  if args[7] == "1" and args[5] == "0" and held_count == 0 then
    gateways.leave(step, gateway) -- a drained gateway's last heartbeat: no slots, nothing held
  else
    gateways.beat(step, gateway, { host = args[2], pid = args[3], version = args[4], slots = args[5],
      started_ms = args[6], draining = args[7] })
  end
  local renewed, lost, cancelled = review(step, held)
  local rows = unknown(step, gateway, held, nonces)
  for _, request in ipairs(rows) do renewed[#renewed + 1] = request.id end
  leases.renew(step, renewed)
  local came_due, ended = due.run(step), reaping.expire(step, DEADLINES_PER_BEAT)
  if (came_due or ended > 0) and rotation.anyone(step) then wake.ring(step) end
  state.save(step)

  local answer = { step.now, step.config.generation, chores.due_in(step), #lost }
  for _, id in ipairs(lost) do answer[#answer + 1] = id end
  answer[#answer + 1] = #cancelled
  for _, id in ipairs(cancelled) do answer[#answer + 1] = id end
  return admission.append_rows(answer, rows)
end

return { run = run }
