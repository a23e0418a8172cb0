--- A group's config document: fields, defaults, bounds, and what does not fit together. Pure: a document in, a
-- normalised document and a list of problems out. Every problem names field, value and what is allowed.
local names = require("lib.names")
local schema = require("schema")
local shapes = require("lib.shapes")

local config = {}

local HOUR_MS = 3600000
local HUGE = 2 ^ 40

-- Each field: name, kind, default, and for whole numbers the bounds. `optional` numbers may be absent or null.
local GROUP_FIELDS = {
  { "policy", "word", "drr", { "drr", "fifo" } },
  { "total_concurrent_dispatch", "whole", 8, 0, 100000 },
  { "default_endpoint", "name", "" },
  { "max_queued", "whole", 100000, 1, HUGE },
  { "max_payload_bytes", "whole", 16777216, 1, 536870912 },
  { "cost_min", "whole", 1, 1, 1000000 },
  { "cost_max", "whole", 16, 1, 1000000 },
  { "lease_ms", "whole", 30000, 300, HOUR_MS },
  { "liveness_ms", "whole", 30000, 300, HOUR_MS },
  { "retention_ms", "whole", 60000, 1000, 24 * HOUR_MS },
  { "reply_ttl_ms", "whole", 300000, 1000, 24 * HOUR_MS },
  { "max_stream_bytes", "whole", 67108864, 1024, HUGE },
  { "max_stream_backlog_bytes", "whole", 33554432, 1024, HUGE },
  { "retry_budget_percent", "whole", 20, 0, 100 },
  { "retry_budget_min_per_s", "whole", 3, 0, 100000 },
  { "hold_max_ms", "whole", 60000, 100, HOUR_MS },
  { "idempotency_ttl_ms", "whole", 24 * HOUR_MS, 1000, 30 * 24 * HOUR_MS },
  { "dead_kept", "whole", 1000, 0, 100000 },
  { "dead_ttl_ms", "whole", 7 * 24 * HOUR_MS, 1000, 90 * 24 * HOUR_MS },
}
local POOL_FIELDS = {
  { "pool_id", "name" },
  { "display_name", "text", "" },
  { "quantum", "whole", 1, 1, 1000000 },
  { "min_concurrent", "whole", 0, 0, 100000 },
  { "max_concurrent", "optional", nil, 1, 100000 },
  { "max_burst_per_visit", "optional", nil, 1, 100000 },
  { "enabled", "flag", true },
  { "endpoint", "name", "" },
  { "endpoint_url", "text", "" },
  { "delivery", "word", "at_most_once", { "at_most_once", "at_least_once" } },
  { "max_attempts", "optional", nil, 1, 100 },
  { "retry_on", "words", "unreachable, disconnected, overloaded",
    { "unreachable", "disconnected", "overloaded", "502", "504" } },
  { "retry_base_ms", "whole", 500, 1, HOUR_MS },
  { "retry_cap_ms", "whole", 30000, 1, HOUR_MS },
  { "on_open", "word", "queue", { "queue", "reject" } },
  { "priority_ageing_ms", "whole", 10000, 0, HOUR_MS },
  { "max_queue_depth", "whole", 10000, 0, HUGE },
  { "max_queue_bytes", "whole", 268435456, 0, HUGE },
  { "default_timeout_ms", "whole", 600000, 1, 24 * HOUR_MS },
  { "max_timeout_ms", "whole", HOUR_MS, 1, 24 * HOUR_MS },
}
local ENDPOINT_FIELDS = {
  { "endpoint_id", "name" },
  { "url", "text" },
  { "api_key_env", "text", "" },
  { "api_key_file", "text", "" },
  { "max_concurrent", "optional", nil, 1, 100000 },
  { "connect_timeout_ms", "whole", 5000, 1, HOUR_MS },
  { "first_byte_timeout_ms", "whole", 600000, 1, HOUR_MS },
  { "idle_timeout_ms", "whole", 120000, 1, HOUR_MS },
  { "use_proxy", "flag", false },
  { "breaker_failures", "whole", 5, 1, 1000000 },
  { "open_ms", "whole", 30000, 10, HOUR_MS },
  { "close_after", "whole", 3, 1, 1000 },
  { "probe_timeout_ms", "whole", 60000, 10, HOUR_MS },
  { "gate", "word", "none", { "none", "vllm", "sglang", "tgi", "llamacpp", "custom" } },
  { "gate_url", "text", "" },
  { "gate_waiting_metric", "text", "" },
  { "gate_token_metric", "text", "" },
  { "gate_target", "whole", 3, 1, 1000000 },
  { "gate_token_ms", "whole", 150, 1, HOUR_MS },
  { "gate_poll_ms", "whole", 250, 50, HOUR_MS },
  { "gate_stale_ms", "whole", 5000, 50, HOUR_MS },
  { "gate_fail", "word", "open", { "open", "closed" } },
}

--- The fields of a document and of the members of its lists, the id first: name, kind, default, bounds; and their `bit`
-- in lib/shapes.lua. Beside each list stand the fields and their defaults by name.
config.FIELDS = { group = GROUP_FIELDS, pools = POOL_FIELDS, endpoints = ENDPOINT_FIELDS }

local function index(fields)
  fields.named, fields.default = {}, {}
  for at = 1, #fields do
    local field = fields[at]
    field.bit = 2 ^ (at - 1)
    fields.named[field[1]], fields.default[field[1]] = field, field[3]
  end
end

index(GROUP_FIELDS)
index(POOL_FIELDS)
index(ENDPOINT_FIELDS)

local function show(value)
  if value == nil or value == cjson.null then return "nothing" end
  if type(value) == "table" then return cjson.encode(value) end
  return tostring(value)
end

local function note(problems, field, value, message)
  problems[#problems + 1] = { field = field, value = string.sub(show(value), 1, 200), message = message }
end

local checks = {}

function checks.whole(value, field)
  local low, high = field[4], field[5]
  if type(value) == "number" and value == math.floor(value) and value >= low and value <= high then return nil end
  return string.format("a whole number from %.0f to %.0f", low, high)
end

checks.optional = checks.whole

function checks.flag(value)
  if type(value) == "boolean" then return nil end
  return "true or false"
end

function checks.text(value)
  if type(value) == "string" and #value <= 2048 then return nil end
  return "text of at most 2048 bytes"
end

function checks.name(value, field)
  if type(value) == "string" and (names.valid(value) or (value == "" and field[3] == "")) then return nil end
  return names.ALLOWED
end

function checks.word(value, field)
  for _, word in ipairs(field[4]) do
    if value == word then return nil end
  end
  return "one of " .. table.concat(field[4], ", ")
end

-- Several words out of a closed list, as a list or as text with commas between. Returns them as text, in the order of
-- the closed list, so that a config holds scalars only and equal sets are equal texts; nil if a word is unknown.
local function join_words(value, field)
  local wanted, joined = {}, {}
  if type(value) == "string" then
    for word in string.gmatch(value, "[^,%s]+") do wanted[word] = true end
  elseif type(value) == "table" and (next(value) == nil or #value > 0) then
    for _, word in ipairs(value) do wanted[tostring(word)] = true end
  else
    return nil
  end
  for _, word in ipairs(field[4]) do
    if wanted[word] then joined[#joined + 1] = word end
    wanted[word] = nil
  end
  return next(wanted) == nil and table.concat(joined, ", ") or nil
end

function checks.words(value, field)
  if join_words(value, field) then return nil end
  return "a list out of " .. table.concat(field[4], ", ")
end

local function note_unknown(source, fields, path, problems, also)
  local known = {}
  for _, field in ipairs(fields) do known[field[1]] = true end
  for name, value in pairs(source) do
    if not known[name] and not (also and also[name]) then
      note(problems, path .. tostring(name), value, "unknown field")
    end
  end
end

-- Put defaults where nothing is said. False if something is required.
local function fill_in(item, fields)
  for _, field in ipairs(fields) do
    local name, default = field[1], field[3]
    if item[name] == nil then
      if default == nil and field[2] ~= "optional" then return false end
      item[name] = default
    end
  end
  return true
end

-- Make of a decoded `item`, in place, what `read` makes of it, as long as all of it is right: the usual case, in which
-- most fields say the default and need no look. False if something is wrong; `read` says what.
local function read_right(item, fields)
  if type(item) ~= "table" then return false end
  local default, null, unsaid, shape = fields.default, cjson.null, #fields, 0
  for name, value in pairs(item) do
    unsaid = unsaid - 1
    if value ~= default[name] then
      local field = fields.named[name]
      if not field then return false end
      if value == null then
        item[name] = nil
        if field[2] ~= "optional" then unsaid = unsaid + 1 end
      elseif checks[field[2]](value, field) then
        return false
      else
        if field[2] == "words" then
          value = join_words(value, field)
          item[name] = value
        end
        if value ~= field[3] then shape = shape + field.bit end
      end
    end
  end
  item.shape = shape
  return unsaid == 0 or fill_in(item, fields)
end

-- Take the known fields of `source`, with defaults; note wrong and unknown ones. `also`: what else may stand there.
local function read(source, fields, path, problems, also)
  local found = {}
  if type(source) ~= "table" then
    note(problems, path, source, "an object")
    return found
  end
  local unread = 0
  for _ in pairs(source) do unread = unread + 1 end
  for _, field in ipairs(fields) do
    local name, value = field[1], source[field[1]]
    if value ~= nil then unread = unread - 1 end
    if value == cjson.null then value = nil end
    if value == nil and field[2] ~= "optional" then
      value = field[3]
      if value == nil then note(problems, path .. name, nil, "required") end
    elseif value ~= nil then
      local allowed = checks[field[2]](value, field)
      if allowed then note(problems, path .. name, value, "allowed: " .. allowed) end
      if field[2] == "words" then value = join_words(value, field) end
    end
    found[name] = value
  end
  if unread > 0 then note_unknown(source, fields, path, problems, also) end
  return found
end

local function path_of(list_name, at)
  return string.format("%s[%d].", list_name, at - 1)
end

-- Read a list of objects that are named by their first field; duplicates are noted.
local function read_list(source, list_name, fields, problems)
  local list, by_id = {}, {}
  local items = source[list_name]
  if items == nil or items == cjson.null then return list, by_id end
  if type(items) ~= "table" or (next(items) ~= nil and #items == 0) then
    note(problems, list_name, items, "allowed: a list")
    return list, by_id
  end
  local id_field = fields[1][1]
  for at, item in ipairs(items) do
    local found = read_right(item, fields) and item or read(item, fields, path_of(list_name, at), problems)
    local id = found[id_field]
    if id and by_id[id] then note(problems, path_of(list_name, at) .. id_field, id, "used twice") end
    if type(id) == "string" then by_id[id] = found end
    list[#list + 1] = found
  end
  return list, by_id
end

-- Whether `authority` is host[:port]; a host of the form of IPv6 stands in brackets.
local function is_authority(authority)
  local host, port = string.match(authority, "^(%[[%x:.]+%])(.*)$")
  if not host then host, port = string.match(authority, "^([^:%[%]]+)(.*)$") end
  if not host then return false end
  if port == "" then return true end
  local number = tonumber(string.match(port, "^:(%d+)$"))
  return number ~= nil and number >= 1 and number <= 65535
end

local function check_url(url, field, problems)
  if type(url) ~= "string" then return end
  local shown = string.gsub(url, "//[^/]*@", "//")
  local authority = string.match(url, "^https?://([^/?#]+)")
  if authority and string.find(authority, "@", 1, true) then
    note(problems, field, shown, "credentials do not belong here: use api_key_env")
  elseif not authority or string.find(url, "[?#%s]") or not is_authority(authority) then
    note(problems, field, shown, "allowed: http(s)://host[:port][/path], no query")
  end
end

local function check_gate(endpoint, path, problems)
  if type(endpoint.gate_url) == "string" and endpoint.gate_url ~= "" then
    check_url(endpoint.gate_url, path .. "gate_url", problems)
  end
  if endpoint.gate == "custom" and endpoint.gate_waiting_metric == "" and endpoint.gate_token_metric == "" then
    note(problems, path .. "gate", "custom", "needs gate_waiting_metric or gate_token_metric")
  end
end

-- Resolve each pool's endpoint: its own URL, a named one, or the group's default.
local function resolve_endpoints(document, endpoints, by_id, problems)
  for at, pool in ipairs(document.pools) do
    if type(pool.endpoint_url) == "string" and pool.endpoint_url ~= "" then
      local path = path_of("pools", at)
      check_url(pool.endpoint_url, path .. "endpoint_url", problems)
      if pool.endpoint ~= "" and pool.endpoint ~= "pool." .. tostring(pool.pool_id) then
        note(problems, path .. "endpoint", pool.endpoint, "give endpoint or endpoint_url, not both")
      end
      shapes.set(pool, POOL_FIELDS.named.endpoint, "pool." .. tostring(pool.pool_id))
      if not by_id[pool.endpoint] then
        local own = read({ endpoint_id = pool.endpoint, url = pool.endpoint_url }, ENDPOINT_FIELDS, path, problems)
        by_id[pool.endpoint], endpoints[#endpoints + 1] = own, own
      end
      by_id[pool.endpoint].url = pool.endpoint_url
    elseif pool.endpoint == "" then
      shapes.set(pool, POOL_FIELDS.named.endpoint, document.default_endpoint)
    elseif not by_id[pool.endpoint] then
      note(problems, path_of("pools", at) .. "endpoint", pool.endpoint, "no endpoint has this id")
    end
  end
end

local function check_group(document, endpoints, by_id, problems)
  if document.total_concurrent_dispatch == 0 then document.total_concurrent_dispatch = 8 end
  if document.default_endpoint == "" then
    document.default_endpoint = (by_id["default"] or endpoints[1] or {}).endpoint_id or "default"
  elseif not by_id[document.default_endpoint] then
    note(problems, "default_endpoint", document.default_endpoint, "no endpoint has this id")
  end
  if type(document.cost_min) == "number" and type(document.cost_max) == "number"
    and document.cost_min > document.cost_max then
    note(problems, "cost_min", document.cost_min, "allowed: at most cost_max (" .. show(document.cost_max) .. ")")
  end
end

local function check_pools(document, problems)
  local protected = 0
  for at, pool in ipairs(document.pools) do
    local low, high = pool.min_concurrent, pool.max_concurrent
    if type(low) == "number" and type(high) == "number" and low > high then
      note(problems, path_of("pools", at) .. "min_concurrent", low, "allowed: at most max_concurrent (" .. high .. ")")
    end
    if pool.enabled and type(low) == "number" then protected = protected + low end
    if type(pool.default_timeout_ms) == "number" and type(pool.max_timeout_ms) == "number"
      and pool.default_timeout_ms > pool.max_timeout_ms then
      note(problems, path_of("pools", at) .. "default_timeout_ms", pool.default_timeout_ms,
        "allowed: at most max_timeout_ms")
    end
    if type(pool.retry_base_ms) == "number" and type(pool.retry_cap_ms) == "number"
      and pool.retry_base_ms > pool.retry_cap_ms then
      note(problems, path_of("pools", at) .. "retry_base_ms", pool.retry_base_ms, "allowed: at most retry_cap_ms")
    end
    if not pool.max_attempts then
      shapes.set(pool, POOL_FIELDS.named.max_attempts, pool.delivery == "at_least_once" and 3 or 1)
    end
  end
  local total = document.total_concurrent_dispatch
  if type(total) == "number" and protected > total then
    note(problems, "pools", "sum of min_concurrent " .. protected,
      "allowed: at most total_concurrent_dispatch (" .. total .. ")")
  end
end

--- Read `source` (a decoded document, which is used up). Returns the document with every default filled in, and a list
-- of problems.
function config.normalise(source)
  local problems = {}
  local document = read(source, GROUP_FIELDS, "", problems, { pools = true, endpoints = true })
  if type(source) ~= "table" then return document, problems end
  local pools, pool_by_id = read_list(source, "pools", POOL_FIELDS, problems)
  local endpoints, endpoint_by_id = read_list(source, "endpoints", ENDPOINT_FIELDS, problems)
  if #pools > schema.limits.pools_max then
    note(problems, "pools", #pools .. " pools", "allowed: at most " .. schema.limits.pools_max)
  end
  if not pool_by_id["default"] then pools[#pools + 1] = read({ pool_id = "default" }, POOL_FIELDS, "", problems) end
  document.pools, document.endpoints = pools, endpoints
  for at, endpoint in ipairs(endpoints) do
    local path = path_of("endpoints", at)
    check_url(endpoint.url, path .. "url", problems)
    check_gate(endpoint, path, problems)
    if endpoint.api_key_env ~= "" and endpoint.api_key_file ~= "" then
      note(problems, path .. "api_key_file", endpoint.api_key_file, "give api_key_env or api_key_file, not both")
    end
  end
  check_group(document, endpoints, endpoint_by_id, problems)
  resolve_endpoints(document, endpoints, endpoint_by_id, problems)
  check_pools(document, problems)
  return document, problems
end

return config
