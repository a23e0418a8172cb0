--- The waiting list's entry: the scalars a peek needs, and the id. Never a body.
-- `cost|sequence|submitted_ms|deadline_ms|bytes|request_id`
local entry = {}

function entry.encode(request)
  return string.format("%d|%d|%d|%d|%d|%s", request.cost, request.seq, request.submitted_ms, request.deadline_ms,
    request.bytes, request.id)
end

--- Decode an entry; one that is none gets `seq` 0 and an empty id.
function entry.decode(text)
  local units, seq, submitted, deadline, bytes, id = string.match(text, "^(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(.*)$")
  if not units then return { text = text, cost = 1, seq = 0, submitted_ms = 0, deadline_ms = 0, bytes = 0, id = "" } end
  return { text = text, cost = tonumber(units), seq = tonumber(seq), submitted_ms = tonumber(submitted),
    deadline_ms = tonumber(deadline), bytes = tonumber(bytes), id = id }
end

return entry
