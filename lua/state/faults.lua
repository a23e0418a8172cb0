--- Error replies: a promise the caller broke. The first word is the code; Python maps it to an exception.
local faults = {}

function faults.bad_argument(name, value, allowed)
  return server.error_reply(string.format("BAD_ARGUMENT %s is %q; allowed: %s", name, tostring(value), allowed))
end

function faults.group_unknown(root)
  return server.error_reply("GROUP_UNKNOWN group " .. root .. " has no configuration; run: dispatch config apply FILE")
end

function faults.contract_mismatch(theirs, ours)
  return server.error_reply(string.format("CONTRACT_MISMATCH caller speaks contract %s, the library speaks %d",
    tostring(theirs), ours))
end

function faults.pool_unknown(pool, known)
  local shown = {}
  for at = 1, math.min(#known, 20) do shown[at] = known[at] end
  return server.error_reply(string.format('POOL_UNKNOWN pool "%s" is not configured; known: %s',
    pool, table.concat(shown, ", ")))
end

return faults
