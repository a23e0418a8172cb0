--- The server's clock, read once per call (it stands still within one).
local clock = {}

--- Milliseconds since the epoch, as a whole number.
function clock.now_ms()
  local time = server.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

return clock
