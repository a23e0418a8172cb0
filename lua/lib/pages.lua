--- Paging through a list of names.
local pages = {}

--- The part of `names` from position `cursor`, at most `limit`; and where to go on, "" at the end.
function pages.part(names, cursor, limit)
  local from = (tonumber(cursor) or 0) + 1
  local part = {}
  for at = from, math.min(#names, from + limit - 1) do part[#part + 1] = names[at] end
  return part, from + limit <= #names and tostring(from + limit - 1) or ""
end

return pages
