--- A normalised config document as JSON: fields in fixed order, so that equal documents are equal texts. Pure.
local config = require("lib.config")
local shapes = require("lib.shapes")

local document = {}

local function encode_value(value)
  if value == nil then return "null" end
  if type(value) == "number" then return string.format("%d", value) end -- whole, by its kind
  if type(value) == "boolean" then return tostring(value) end
  return value == "" and '""' or cjson.encode(value)
end

-- The form of all objects of one shape: the names of the fields that are `said`, and in `parts` the texts around the
-- places of their values.
local function new_form(shape, fields)
  local said, parts, text = {}, {}, "{"
  for at, field in ipairs(fields) do
    text = text .. (at > 1 and ',"' or '"') .. field[1] .. '":'
    if shapes.says(shape, field) then
      said[#said + 1] = field[1]
      parts[#parts + 1], parts[#parts + 2] = text, "its value"
      text = ""
    else
      text = text .. encode_value(field[3])
    end
  end
  parts[#parts + 1] = text .. "}"
  return { said = said, parts = parts }
end

-- Each object of the list as JSON.
local function encode_objects(list, fields)
  local texts, forms, values = {}, {}, {}
  for number, object in ipairs(list) do
    local shape = shapes.of(object, fields)
    local form = forms[shape] or new_form(shape, fields)
    forms[shape] = form
    local said, parts = form.said, form.parts
    for at = 1, #said do
      local value = object[said[at]]
      local text = values[value]
      if not text then
        text = encode_value(value)
        values[value] = text
      end
      parts[2 * at] = text
    end
    texts[number] = table.concat(parts)
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
