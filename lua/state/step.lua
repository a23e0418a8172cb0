--- One atomic step: what has been read, and is written back once at the end.
-- Every function begins a step, works on the records in it, and saves it. Nothing is written before all checks are
-- done.
local clock = require("state.clock")
local endpoints = require("state.endpoints")
local group = require("state.group")
local pools = require("state.pools")
local requests = require("state.requests")
local wake = require("state.wake")

local step = {}

--- Begin a step, or return nil when the group was never configured.
function step.begin(root)
  local config, record = group.load(root)
  if not config then return nil end
  return { root = root, now = clock.now_ms(), config = config, group = record, pools = {}, endpoints = {}, ended = 0 }
end

--- Write everything back. The records are used up by that: what is answered from them is taken before.
function step.save(self)
  pools.save(self)
  endpoints.save(self)
  requests.save(self)
  if self.timer_moved then wake.ring(self) end -- who sleeps was told to look later than that
  group.save(self.root, self.group)
end

return step
