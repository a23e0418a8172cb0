--- The shape of an object of a config: which of its fields say something else than the default, as one number, a bit a
-- field. In a large config most objects have one of a few shapes, so what a shape determines is found out once. Pure.
local shapes = {}

--- The shape of an object with these `fields` (lib/config.lua). Kept in the object.
function shapes.of(object, fields)
  local shape = object.shape
  if shape then return shape end
  shape = 0
  for name, value in pairs(object) do
    local field = fields.named[name]
    if field and value ~= field[3] then shape = shape + field.bit end
  end
  object.shape = shape
  return shape
end

--- Whether an object of this shape says something else than the default in `field`.
function shapes.says(shape, field)
  return math.floor(shape / field.bit) % 2 == 1
end

--- Set a field of an object that has its shape already, or has none.
function shapes.set(object, field, value)
  local name, default = field[1], field[3]
  local said, says = object[name] ~= default, value ~= default
  if object.shape and said ~= says then object.shape = object.shape + (says and field.bit or -field.bit) end
  object[name] = value
end

return shapes
