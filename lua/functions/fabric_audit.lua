--- fabric_audit: hold what is stored against what is there, one part and page at a time.
-- Keys:    group root
-- Args:    part (group pools endpoints entries leases timers chores requests dead), cursor ("" = from the start),
--          limit, subject (the pool, for entries)
-- Answers: JSON text: server_ms, part, cursor ("" = the end), and for
--          group, pools, endpoints: rows of name, stored (counters) and counted (the same, from the structures);
--          entries: entries, live, tombstones, foreign, bytes and level_0 to level_3 of this page; leases: counts by
--          pool, endpoint, gateway of this page, and ids without a running request; timers, chores: members that are
--          for nothing that is there (stray); timers, requests: pool by id of those that wait for their next attempt
--          (delayed); requests: which of them have no timer (untimed); dead: ids of which nothing is kept (broken)
-- Errors:  GROUP_UNKNOWN, BAD_ARGUMENT
-- Moves:   (none)
-- Touches: group, pool, endpoint, rotation, heads, kept, waiting, requests, flow, flows, idle_flows, returned, leases,
--          request, timers, chores, deadlines, dead
-- Flags:   no-writes
-- Cost:    linear in limit
-- Twice:   reads again
local audit = require("state.audit")
local faults = require("state.faults")
local group = require("state.group")
local schema = require("schema")
local state = require("state.step")

local PARTS = "group, pools, endpoints, entries, leases, timers, chores, requests, dead"

local function run(keys, args)
  local part, cursor, limit, subject = args[1], args[2] or "", tonumber(args[3]), args[4] or ""
  if not limit or limit < 1 or limit > schema.limits.snapshot_page_max then
    return faults.bad_argument("limit", args[3], "1 to " .. schema.limits.snapshot_page_max)
  end
  local read = audit.parts[part]
  if not read then return faults.bad_argument("part", part, PARTS) end
  local step = state.begin(keys[1])
  if not step then return faults.group_unknown(keys[1]) end
  local found = read(step, group.details(keys[1]), { cursor = cursor, limit = limit, subject = subject })
  found.server_ms, found.part, found.cursor = step.now, part, found.cursor or ""
  return cjson.encode(found)
end

return { run = run }
