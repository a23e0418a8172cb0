--- Keys of one group, made from the schema's templates.
local schema = require("schema")

local keys = {}

-- The literal pieces of each key, by root and name: derived from the schema only, so keeping them between calls holds
-- no state. Forgotten when a server serves more groups than this.
local ROOTS_MAX = 1000
local pieces, roots = {}, 0

local function split(of_root, root, name)
  local found, rest = {}, root .. ":" .. schema.keys[name].key
  while true do
    local before, after = string.match(rest, "^(.-)<%a+>(.*)$")
    if not before then break end
    found[#found + 1] = before
    rest = after
  end
  found[#found + 1] = rest
  of_root[name] = found
  return found
end

local function begin(root)
  if roots >= ROOTS_MAX then pieces, roots = {}, 0 end
  roots = roots + 1
  pieces[root] = {}
  return pieces[root]
end

--- The full key `name`, its parts filled in, for the group whose root is `root` (KEYS[1]).
function keys.of(root, name, first, second, third)
  local of_root = pieces[root] or begin(root)
  local part = of_root[name] or split(of_root, root, name)
  if not second then return first and part[1] .. first .. part[2] or part[1] end
  if third then return part[1] .. first .. part[2] .. second .. part[3] .. third .. part[4] end
  return part[1] .. first .. part[2] .. second .. part[3]
end

return keys
