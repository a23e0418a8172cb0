--- Earlier attempts of one request: what became of each. Pure.
local tries = {}

-- Words only: they travel in a header whose cells end at a bar.
local function word(value)
  return (string.gsub(tostring(value or ""), "[^%w_.-]", "_"))
end

--- Note the attempt that is over now. `details`: what its gateway wrote about it (JSON), "" = nothing.
function tries.add(request, ended_ms, status, error_type, details)
  request.tries = request.tries or {}
  request.tries[#request.tries + 1] = { request.attempt, request.claimed_ms, ended_ms, word(status), word(error_type),
    request.gateway, request.endpoint, details ~= "" and details or nil }
end

--- As text: attempt,claimed_ms,ended_ms,status,error_type,gateway,endpoint;...
function tries.encode(list)
  if not list then return "" end
  local cells = {}
  for at, one in ipairs(list) do
    cells[at] = string.format("%d,%.0f,%.0f,%s,%s,%s,%s", one[1], one[2], one[3], one[4], one[5], one[6], one[7])
  end
  return table.concat(cells, ";")
end

--- Their details as one JSON array, in the same order; "" when there is none.
function tries.encode_details(list)
  if not list then return "" end
  local cells = {}
  for at, one in ipairs(list) do cells[at] = one[8] or "{}" end
  return "[" .. table.concat(cells, ",") .. "]"
end

return tries
