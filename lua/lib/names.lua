--- Names that travel into keys.
local schema = require("schema")

local names = {}

names.ALLOWED = "1 to 128 of letters, digits, '.', '_', '-'"

function names.valid(text)
  return #text <= schema.contract.name_max_length and string.match(text, "^[%w._-]+$") ~= nil
end

return names
