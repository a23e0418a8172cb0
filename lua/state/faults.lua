--- Error replies: a promise the caller broke. The first word is the code; Python maps it to an exception.
-- `texts`: an error about one item of a batch stands in its answer, as text of the same form.
local faults = { texts = {} }

function faults.texts.bad_argument(name, value, allowed)
  local shown = string.gsub(string.sub(tostring(value), 1, 100), "[%c]", "?")
  return string.format('BAD_ARGUMENT %s is "%s"; allowed: %s', name, shown, allowed)
end

function faults.bad_argument(name, value, allowed)
  return server.error_reply(faults.texts.bad_argument(name, value, allowed))
end

function faults.group_unknown(root)
  local group = string.sub(root, 2, -2)
  return server.error_reply("GROUP_UNKNOWN group " .. group .. " has no configuration; run: dispatch config apply FILE")
end

function faults.contract_mismatch(theirs, ours)
  return server.error_reply(string.format("CONTRACT_MISMATCH caller speaks contract %s, the library speaks %d",
    tostring(theirs), ours))
end

function faults.texts.pool_unknown(pool, known)
  local shown = {}
  for at = 1, math.min(#known, 20) do shown[at] = known[at] end
  return string.format('POOL_UNKNOWN pool "%s" is not configured; known: %s', pool, table.concat(shown, ", "))
end

function faults.state_conflict(what)
  return server.error_reply("STATE_CONFLICT " .. what)
end

function faults.pool_unknown(pool, known)
  return server.error_reply(faults.texts.pool_unknown(pool, known))
end

return faults
