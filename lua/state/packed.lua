--- Values that are stored as one text each, so that a step reads and writes once: records as MessagePack, configs as
-- MessagePack or as the JSON objects that they are in the group's document.
local packed = {}

-- Decoded configs by their text. Decoding is a pure function of that text, so remembering its results holds no state of
-- the group; whoever gets one must not change it. Emptied when full: 1,000 pools and their endpoints fit.
local REMEMBERED_MAX = 4096
local remembered, count = {}, 0

local function decode_text(text)
  if string.sub(text, 1, 1) ~= "{" then return cmsgpack.unpack(text) end
  local config, null = cjson.decode(text), cjson.null
  for name, value in pairs(config) do
    if value == null then config[name] = nil end
  end
  return config
end

--- Remember what a config's text says, for whoever reads it next. From now on nobody may change `config`.
function packed.remember(text, config)
  if count >= REMEMBERED_MAX then remembered, count = {}, 0 end
  remembered[text], count = config, count + 1
end

-- A config that an older library stored says nothing of younger fields: their defaults hold.
local function decode(text, fields)
  local config = decode_text(text)
  if next(config) == nil then return config end -- of an endpoint that was left out: it limits nothing
  for _, field in ipairs(fields) do
    if config[field[1]] == nil then config[field[1]] = field[3] end
  end
  return config
end

--- Decode a config, once per text. `fields`: those of lib/config.lua it may have. Read only.
function packed.read_config(text, fields)
  local config = remembered[text]
  if not config then
    config = decode(text, fields)
    packed.remember(text, config)
  end
  return config
end

--- Unpack a record by `unpack_it` of its kind (module `records`); nil when there is none or it cannot be read.
function packed.read_record(text, unpack_it)
  local readable, record = pcall(unpack_it, text)
  return readable and record or nil
end

return packed
