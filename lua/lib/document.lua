--- A normalised config document as JSON: fields in fixed order, so that equal documents are equal texts. Pure.
local config = require("lib.config")

local document = {}

local function encode_value(value)
  if value == nil then return "null" end
  if type(value) == "number" then return string.format("%d", value) end -- whole, by its kind
  if type(value) == "boolean" then return tostring(value) end
  return value == "" and '""' or cjson.encode(value)
end

-- The member at `at`; the first and the last one bring the object's braces.
local function encode_member(fields, at, value)
  return (at == 1 and '{"' or '"') .. fields[at][1] .. '":' .. encode_value(value) .. (at == #fields and "}" or "")
end

-- The members of an object that says nothing but defaults: most members of most objects.
local function plain_members(fields)
  local members = {}
  for at = 1, #fields do members[at] = encode_member(fields, at, fields[at][3]) end
  return members
end

-- Each object of the list as JSON. Every member text is made once; those that say something else than the default take
-- the place of the plain one for a moment.
local function encode_objects(list, fields)
  local texts, plain, members, made = {}, plain_members(fields), plain_members(fields), {}
  local default, position, said = fields.default, fields.at, {}
  for at = 1, #fields do made[at] = {} end
  for number, object in ipairs(list) do
    local count = 0
    for name, value in pairs(object) do
      local at = value ~= default[name] and position[name]
      if at then
        local member = made[at][value]
        if not member then
          member = encode_member(fields, at, value)
          made[at][value] = member
        end
        count = count + 1
        said[count], members[at] = at, member
      end
    end
    texts[number] = table.concat(members, ",")
    for each = 1, count do members[said[each]] = plain[said[each]] end
  end
  return texts
end

--- Returns the document's text, and those of its `pools` and `endpoints`, in order.
function document.encode(normalised)
  local fields = config.FIELDS
  local texts = { pools = encode_objects(normalised.pools, fields.pools),
    endpoints = encode_objects(normalised.endpoints, fields.endpoints) }
  local group = encode_objects({ normalised }, fields.group)[1]
  return string.sub(group, 1, -2) .. ',"pools":[' .. table.concat(texts.pools, ",") .. '],"endpoints":['
    .. table.concat(texts.endpoints, ",") .. "]}", texts
end

return document
