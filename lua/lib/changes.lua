--- What differs between two configs of a group, field by field, in words a person reads. Pure.
local config = require("lib.config")

local changes = {}

local function word(value)
  if value == nil then return "none" end
  if value == "" then return '""' end
  return tostring(value)
end

-- Count a change. True if it is among those to be shown, so that words are made for these only.
local function count(found)
  found.count = found.count + 1
  return found.count <= found.most
end

local function show(found, field, before, after)
  found.shown[#found.shown + 1] = { field, before, after }
end

local function path_of(list_name, id)
  return list_name and list_name .. "[" .. id .. "]" or ""
end

-- Compare the fields of one object (of a list, if it is named). Whether any differs.
local function compare(found, fields, list_name, old, new)
  local differs = false
  for at = 1, #fields do
    local name = fields[at][1]
    local before, after = old[name], new[name]
    if before ~= after then
      differs = true
      if count(found) then
        local owner = list_name and path_of(list_name, new[fields[1][1]]) .. "." or ""
        show(found, owner .. name, word(before), word(after))
      end
    end
  end
  return differs
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

-- Compare two lists of objects. Returns the ids of those that are new or differ, as a set.
local function compare_lists(found, list_name, old, new)
  local fields = config.FIELDS[list_name]
  local id_field, before, after, changed = fields[1][1], {}, {}, {}
  for _, item in ipairs(old) do before[item[id_field]] = item end
  for _, item in ipairs(new) do
    local id = item[id_field]
    after[id] = true
    if not before[id] then
      changed[id] = true
      if count(found) then show(found, path_of(list_name, id), "absent", summary(item, fields)) end
    elseif compare(found, fields, list_name, before[id], item) then
      changed[id] = true
    end
  end
  for _, item in ipairs(old) do
    local id = item[id_field]
    if not after[id] and count(found) then show(found, path_of(list_name, id), summary(item, fields), "absent") end
  end
  return changed
end

--- The changes from `old` to `new`: their count, the first `most` of them `shown` as { field, before, after }, and the
-- sets of `pools` and `endpoints` that are new or differ. Each config has `group` (scalar fields, nil when there was
-- no config), `pools` and `endpoints` (lists in order).
function changes.between(old, new, most)
  local found = { count = 0, most = most, shown = {} }
  if old.group then compare(found, config.FIELDS.group, nil, old.group, new.group) end
  found.pools = compare_lists(found, "pools", old.pools, new.pools)
  found.endpoints = compare_lists(found, "endpoints", old.endpoints, new.endpoints)
  return found
end

--- No field differs and the documents do: say what else it can be.
function changes.note_order(found)
  if count(found) then show(found, "order", "pools and endpoints as they stood", "another order") end
end

return changes
