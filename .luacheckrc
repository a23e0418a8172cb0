-- The library runs inside Valkey: Lua 5.1 with what the server adds.
std = "lua51"
read_globals = { "server", "redis", "cjson", "cmsgpack", "struct", "bit" }
-- `require` is the joiner's: each file is a function of the joined text, which hands modules out.
max_line_length = 120
codes = true
