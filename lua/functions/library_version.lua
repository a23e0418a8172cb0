--- library_version: say which library this server runs.
-- Keys:    group root (not read)
-- Args:    (none)
-- Answers: contract digest version
-- Errors:  (none)
-- Moves:   (none)
-- Touches: (none)
-- Flags:   no-writes
-- Cost:    constant
-- Twice:   same answer
local build = require("build")
local schema = require("schema")

local function run()
  return { schema.contract.version, build.digest, build.version }
end

return { run = run }
