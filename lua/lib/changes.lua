--- What differs between two configs of a group, field by field, in words a person reads. Pure.
local config = require("lib.config")

local changes = {}

local function word(value)
  if value == nil then return "none" end
  if value == "" then return '""' end
  return tostring(value)
end

local function note(found, field, before, after)
  found[#found + 1] = { field, before, after }
end

local function compare(found, path, old, new, fields)
  for _, field in ipairs(fields) do
    local name = field[1]
    if old[name] ~= new[name] then note(found, path .. name, word(old[name]), word(new[name])) end
  end
end

-- What an object says beyond its id and the defaults.
local function summary(object, fields)
  local cells = {}
  for at = 2, #fields do
    local name, default = fields[at][1], fields[at][3]
    if object[name] ~= nil and object[name] ~= default then cells[#cells + 1] = name .. " " .. word(object[name]) end
  end
  return #cells > 0 and table.concat(cells, ", ") or "defaults"
end

local function compare_lists(found, list_name, old, new, fields)
  local id_field, before, after = fields[1][1], {}, {}
  for _, item in ipairs(old) do before[item[id_field]] = item end
  for _, item in ipairs(new) do
    local id = item[id_field]
    local path = list_name .. "[" .. id .. "]"
    after[id] = true
    if before[id] then
      compare(found, path .. ".", before[id], item, fields)
    else
      note(found, path, "absent", summary(item, fields))
    end
  end
  for _, item in ipairs(old) do
    local id = item[id_field]
    if not after[id] then note(found, list_name .. "[" .. id .. "]", summary(item, fields), "absent") end
  end
end

--- The changes from `old` to `new` as a list of { field, before, after }. Each config has `group` (its scalar fields,
-- nil when there was no config), `pools` and `endpoints` (lists in order).
function changes.between(old, new)
  local found = {}
  if old.group then compare(found, "", old.group, new.group, config.FIELDS.group) end
  compare_lists(found, "pools", old.pools, new.pools, config.FIELDS.pools)
  compare_lists(found, "endpoints", old.endpoints, new.endpoints, config.FIELDS.endpoints)
  if #found == 0 then note(found, "order", "pools and endpoints as they stood", "another order") end
  return found
end

return changes
