--- The breaker of one endpoint's record: closed, open, half-open with one probe at a time. Pure.
--
-- Origin: Nygard, "Release It!". Here the state is shared by all gateways, a probe is an ordinary launch (or a request
-- for /models where nothing waits), and it is over when its time has passed: one that never reports cannot keep the
-- endpoint closed off. Overload (429, 503) is no failure: it holds the endpoint and leaves the breaker alone.
--
-- A record has: breaker (absent = closed, "open", "half_open"), in_a_row (failures), open_until, good (probes that went
-- well), probe ({ id, fence, gateway, since, until_ms }; id "" = not a request), hold_until.
local breaker = {}

--- The state at `now`: an open breaker whose time is over is half-open.
function breaker.state(record, now)
  if record.breaker == "open" and now >= record.open_until then return "half_open" end
  return record.breaker or "closed"
end

--- Whether a probe is under way.
function breaker.probing(record, now)
  return record.probe ~= nil and now < record.probe.until_ms
end

--- Until when nothing may be launched because of the breaker, or nil.
function breaker.blocked_until(record, now)
  if not record.breaker then return nil end
  if record.breaker == "open" and now < record.open_until then return record.open_until end
  return breaker.probing(record, now) and record.probe.until_ms or nil
end

--- What is launched now is a probe. Returns whether the breaker was open until now.
function breaker.begin_probe(record, probe)
  local was_open = record.breaker == "open"
  record.breaker, record.probe = "half_open", probe
  return was_open
end

--- Whether this run is the probe.
function breaker.is_probe(record, id, fence)
  return record.probe ~= nil and record.probe.id == id and record.probe.fence == fence
end

local function open(record, config, now)
  record.breaker, record.opened_ms, record.open_until = "open", now, now + config.open_ms
  record.good, record.probe = nil, nil
  return "open"
end

--- Take in a verdict (good, failure; anything else says nothing). Returns the new state if it moved.
-- While the breaker is not closed only the probe's verdict counts: others began before.
function breaker.note(record, config, verdict, probe, now)
  if probe then record.probe = nil end
  if record.breaker == nil then
    if verdict == "good" then
      record.in_a_row = nil
    elseif verdict == "failure" then
      record.in_a_row = (record.in_a_row or 0) + 1
      local most = config.breaker_failures
      if most and record.in_a_row >= most then return open(record, config, now) end
    end
  elseif probe and verdict == "good" then
    record.good = (record.good or 0) + 1
    if record.good >= (config.close_after or 1) then
      record.breaker, record.good, record.in_a_row, record.open_until = nil, nil, nil, nil
      return "closed"
    end
  elseif probe and verdict == "failure" and config.open_ms then
    return open(record, config, now)
  end
  return nil
end

return breaker
