--- The gate of one endpoint: launches stop while the engine's own queue is full or its tokens come slowly. Pure.
--
-- Origin: feedback gating as TNG describes it for request queues before inference engines. One gateway at a time polls
-- the engine; between two samples every launch counts as if it waited there. With nothing of ours running, one launch
-- goes through whatever the sample says, so that a wrong or old sample cannot stop everything.
--
-- A record has gate = { waiting, token_ms (absent = unknown), at, launched, gateway }, and in_flight.
local gate = {}

--- Whether the endpoint has a gate.
function gate.configured(config)
  return config.gate ~= nil and config.gate ~= "none"
end

--- Whether there is no sample, or only one that is too old.
function gate.stale(record, config, now)
  return not record.gate or now - record.gate.at > config.gate_stale_ms
end

--- Whether nothing may be launched because of the gate.
function gate.blocks(record, config, now)
  if not gate.configured(config) or record.in_flight == 0 then return false end
  if gate.stale(record, config, now) then return config.gate_fail == "closed" end
  local sample = record.gate
  if sample.waiting and sample.waiting + sample.launched >= config.gate_target then return true end
  return sample.token_ms ~= nil and sample.token_ms > config.gate_token_ms
end

--- When a gate that blocks will let through by time alone, or nil: an old sample is as good as none.
function gate.blocked_until(record, config)
  if config.gate_fail == "closed" or not record.gate then return nil end
  return record.gate.at + config.gate_stale_ms + 1
end

return gate
