--- What differs between two configs of a group, field by field, in words a person reads. Pure.
local config = require("lib.config")
local shapes = require("lib.shapes")

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
  return list_name .. "[" .. id .. "]"
end

local function no_owner() return "" end

-- Compare the `fields` (a list) of one object. `owner` is what it is called. Whether any differs.
local function compare(found, fields, owner, old, new)
  local differs = false
  for at = 1, #fields do
    local name = fields[at][1]
    local before, after = old[name], new[name]
    if before ~= after then
      differs = true
      if count(found) then show(found, owner(new) .. name, word(before), word(after)) end
    end
  end
  return differs
end

-- Whoever knows the shapes of two objects gets the list of those fields that can differ.
local function comparable(fields)
  local known = {}
  return function(old, new)
    local from, to = shapes.of(old, fields), shapes.of(new, fields)
    local of = known[from] or {}
    known[from] = of
    if not of[to] then
      local found = {}
      for _, field in ipairs(fields) do
        if shapes.says(from, field) or shapes.says(to, field) then found[#found + 1] = field end
      end
      of[to] = found
    end
    return of[to]
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

-- Compare two lists of objects. Returns the ids of those that are new or differ, as a set, and a list of those that are
-- left out.
local function compare_lists(found, list_name, old, new)
  local fields = config.FIELDS[list_name]
  local id_field, before, changed, gone, kept = fields[1][1], {}, {}, {}, 0
  local fields_of = comparable(fields)
  local function owner(item) return path_of(list_name, item[id_field]) .. "." end
  for _, item in ipairs(old) do before[item[id_field]] = item end
  for _, item in ipairs(new) do
    local id = item[id_field]
    local was = before[id]
    if not was then
      changed[id] = true
      if count(found) then show(found, path_of(list_name, id), "absent", summary(item, fields)) end
    else
      kept = kept + 1
      if compare(found, fields_of(was, item), owner, was, item) then changed[id] = true end
    end
  end
  if kept == #old then return changed, gone end
  for _, item in ipairs(new) do before[item[id_field]] = nil end
  for _, item in ipairs(old) do
    local id = item[id_field]
    if before[id] then
      gone[#gone + 1] = id
      if count(found) then show(found, path_of(list_name, id), summary(item, fields), "absent") end
    end
  end
  return changed, gone
end

--- The changes from `old` to `new`: their count, the first `most` of them `shown` as { field, before, after }, and the
-- sets of `pools` and `endpoints` that are new or differ, and the list of pools that are left out (`gone`). Each config
-- has `group` (scalar fields, nil when there was no config), `pools` and `endpoints` (lists in order).
function changes.between(old, new, most)
  local found = { count = 0, most = most, shown = {} }
  if old.group then compare(found, config.FIELDS.group, no_owner, old.group, new.group) end
  found.pools, found.gone = compare_lists(found, "pools", old.pools, new.pools)
  found.endpoints = compare_lists(found, "endpoints", old.endpoints, new.endpoints)
  return found
end

--- No field differs and the documents do: say what else it can be.
function changes.note_order(found)
  if count(found) then show(found, "order", "pools and endpoints as they stood", "another order") end
end

return changes
