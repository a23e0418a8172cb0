--- Keys of one group, made from the schema's templates.
local schema = require("schema")

local keys = {}

-- The literal pieces of each template. Derived from the schema only, so keeping them between calls holds no state.
local pieces = {}

local function split(name)
  local found, rest = {}, schema.keys[name].key
  while true do
    local before, after = string.match(rest, "^(.-)<%a+>(.*)$")
    if not before then break end
    found[#found + 1] = before
    rest = after
  end
  found[#found + 1] = rest
  pieces[name] = found
  return found
end

--- The full key `name`, its parts filled in, for the group whose root is `root` (KEYS[1]).
function keys.of(root, name, first, second)
  local part = pieces[name] or split(name)
  if second then return root .. ":" .. part[1] .. first .. part[2] .. second .. part[3] end
  if first then return root .. ":" .. part[1] .. first .. part[2] end
  return root .. ":" .. part[1]
end

return keys
