--- Packed values: configs and records are stored as one MessagePack value each, so that a step reads and writes once.
local packed = {}

-- Unpacked configs by their packed text. Unpacking is a pure function of that text, so remembering its results holds no
-- state of the group; whoever gets one must not change it. Emptied when full: 1,000 pools and their endpoints fit.
local REMEMBERED_MAX = 4096
local remembered, count = {}, 0

--- Unpack a config, once per text. Read only.
function packed.read_config(text)
  local config = remembered[text]
  if config then return config end
  if count >= REMEMBERED_MAX then remembered, count = {}, 0 end
  config = cmsgpack.unpack(text)
  remembered[text], count = config, count + 1
  return config
end

--- Unpack a record; nil when there is none or it cannot be read.
function packed.read_record(text)
  local readable, record = pcall(cmsgpack.unpack, text or "")
  return readable and type(record) == "table" and next(record) and record or nil
end

return packed
