--- Bearer keys of the group's callers: a record (JSON text that Lua does not read) by key id. The secret itself is
-- never here, only its hash, in the record.
local keys = require("state.keys")

local api_keys = {}

--- Store a new key. False when the id is in use.
function api_keys.create(root, id, record)
  return server.call("HSETNX", keys.of(root, "keys"), id, record) == 1
end

--- Forget a key. False when there is none.
function api_keys.revoke(root, id)
  return server.call("HDEL", keys.of(root, "keys"), id) == 1
end

--- The record of one key, or nil.
function api_keys.find(root, id)
  return server.call("HGET", keys.of(root, "keys"), id) or nil
end

--- All keys as a flat list of id and record.
function api_keys.all(root)
  return server.call("HGETALL", keys.of(root, "keys"))
end

--- How many there are.
function api_keys.count(root)
  return server.call("HLEN", keys.of(root, "keys"))
end

return api_keys
