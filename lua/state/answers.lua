--- The last answer of each gateway's claims and settles, so that a repeated call (its answer was lost) is answered the
-- same and done once. A gateway has one such call under way, so one answer is kept.
local keys = require("state.keys")
local leases = require("state.leases")
local requests = require("state.requests")

local answers = {}

--- Keep the answer of the call `nonce`: words for settled items and the claimed leases, as
-- `word,word;id:fence,id:fence;nonce` (neither words nor ids have such signs).
function answers.remember(step, gateway, nonce, words, made)
  local kept = {}
  for at, request in ipairs(made) do kept[at] = request.id .. ":" .. request.fence end
  server.call("SET", keys.of(step.root, "answer", gateway),
    table.concat(words, ",") .. ";" .. table.concat(kept, ",") .. ";" .. nonce, "PX", 2 * step.config.lease_ms)
end

local function read(stored)
  local said, claimed, nonce = string.match(stored, "^([^;]*);([^;]*);(.*)$")
  if not said then return {} end -- an older library wrote it
  local words, made = {}, {}
  for word in string.gmatch(said, "[^,]+") do words[#words + 1] = word end
  for id, fence in string.gmatch(claimed, "([^,:]+):(%d+)") do made[#made + 1] = { id, tonumber(fence) } end
  return { nonce = nonce, words = words, made = made }
end

--- The words of the call `nonce` and those of its leases that are still current; nil if it is another call.
function answers.recall(step, gateway, nonce)
  local stored = server.call("GET", keys.of(step.root, "answer", gateway))
  if not stored then return nil end
  local answer = read(stored)
  if answer.nonce ~= nonce then return nil end
  local made, ids = {}, {}
  for _, pair in ipairs(answer.made) do ids[#ids + 1] = pair[1] end
  local ends = leases.ends(step, ids)
  for at, pair in ipairs(answer.made) do
    local request = requests.get_whole(step, pair[1])
    if request and ends[at] and request.state == "leased" and request.fence == pair[2] then
      request.lease_until = ends[at]
      made[#made + 1] = request
    end
  end
  return answer.words, made
end

return answers
