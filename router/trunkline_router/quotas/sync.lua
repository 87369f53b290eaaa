-- Stores a router's report and returns what is new to it. See Report and SyncReply in store.py.
-- KEYS: life, convictions, routers, credits, versions, leases, served, then a window and the tokens in flight for each
--       tenant in the report
-- ARGV: the report as JSON, now (empty: the server's)
-- Returns pieces that are quick to decode: a JSON object, then alternately a kind and a JSON list of its entries.
local LIFE, CONVICTIONS, ROUTERS, CREDITS, VERSIONS, LEASES, SERVED = unpack(KEYS, 1, 7)
local report = cjson.decode(ARGV[1])
local now = clock(ARGV[2])
local keep_ms = report.keep_ms

-- Limits of one reply: entries and bytes per piece, and bytes per kind. A router decodes some 50 MB a second.
local PIECE_ENTRIES, PIECE_BYTES, TOLD_BYTES = 256, 32768, 524288
local LONGEST_FINGERPRINT = 256

-- A life also belongs to one server process: the state that another process left behind (an older snapshot, a replica
-- that lagged) is incomplete, and what is missing cannot be known. Its keys are no longer used and expire.
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
local life = text_in(LIFE)
if not life or #life > 128 or string.match(life, '^%x+@(%x*)$') ~= run_id then life = report.new_life .. '@' .. run_id end
-- This write comes first because a full Redis refuses it and so ends the script. After a write of a kind that it
-- permits, Redis would let all others of the script pass.
redis.call('SET', LIFE, life, 'PX', keep_ms)
if life ~= report.life then
  local memory = redis.call('INFO', 'memory')
  local policy, notes = string.match(memory, 'maxmemory_policy:([%w-]+)'), {}
  if policy and policy ~= 'noeviction' and string.match(memory, 'maxmemory:(%d+)') ~= '0' then
    notes = {{'Redis evicts keys when it is full, and with them quotas: set its maxmemory-policy to noeviction', policy}}
  end
  return {cjson.encode({life = life, is_new = true, notes = notes})}
end

local function bump(name)
  if not whole_until(redis.call('HGET', VERSIONS, name) or '0', 1e14) then
    redis.call('HSET', VERSIONS, name, string.format('%.0f', now))  -- a version that no router knows
  end
  redis.call('HINCRBY', VERSIONS, name, 1)
end

for key, most in pairs({
  [ROUTERS] = MOST_ROUTERS, [CREDITS] = MOST_ROUTERS, [LEASES] = MOST_LEASES, [SERVED] = MOST_FIELDS,
  [VERSIONS] = MOST_BUCKETS,
}) do claim(key, 'hash', keep_ms, most) end
claim(CONVICTIONS, 'zset', report.most_conviction_ms, 2 * report.most_convictions)
for key = 8, #KEYS do
  claim(KEYS[key], 'hash', 2 * report.window_ms, key % 2 == 0 and MOST_BUCKETS or 2 * MOST_ROUTERS)
end

-- This router's entry: its expiry, the version of its credits, and the number of its last counted report. The version
-- is left out if the router has sent no credits; older routers never write it.
local function version_in(entry)
  return whole(string.match(entry, '^%d+:(%d+):%d+$'))
end
local mine = redis.call('HGET', ROUTERS, report.router)
local counted = mine and whole(string.match(mine, ':(%d+)$')) or 0
local is_new = report.number > counted
-- Its credits get a new version if they differ from those in Redis.
local version, credits = mine and version_in(mine), nil
if report.credits then
  version, credits = string.match(redis.call('HGET', CREDITS, report.router) or '', '^(%d+)|(.*)$')
  version = whole(version)
  if not version or credits ~= report.credits then
    version = report.number
    redis.call('HSET', CREDITS, report.router, string.format('%.0f|', version) .. report.credits)
  end
end
local entry = string.format(
  '%.0f:%s%.0f', now + report.ttl_ms, version and string.format('%.0f:', version) or '', math.max(counted, report.number)
)
redis.call('HSET', ROUTERS, report.router, entry)
redis.call('PEXPIRE', ROUTERS, keep_ms)

for index, tenant in ipairs(report.tenants) do
  local window_key, flight_key = KEYS[6 + 2 * index], KEYS[7 + 2 * index]
  if is_new and #tenant.changes > 0 then
    local window = open_window(window_key, report.window_ms, now)
    for _, change in ipairs(tenant.changes) do
      local number = change[4] ~= cjson.null and change[4] or math.floor((now - change[1]) / window.width)
      if number >= window.current - BUCKETS then add_to_window(window, number, change[2], change[3]) end
    end
  end
  if tenant.in_flight ~= cjson.null then
    redis.call('HSET', flight_key, report.router, string.format('%.0f', tenant.in_flight))
  elseif is_new and tenant.in_flight_change ~= 0 then
    add(flight_key, report.router, tenant.in_flight_change)
  end
  redis.call('PEXPIRE', flight_key, 2 * report.window_ms)
end

redis.call('PEXPIRE', CREDITS, keep_ms)
local answer = {life = life, notes = {}}
local pieces = {false}

-- Adds entries of a kind, given as {entry, bytes}, to the reply. If `most_bytes` are not enough, the smallest go first.
local function tell(kind, entries, most_bytes)
  local all = 0
  for _, entry in ipairs(entries) do all = all + entry[2] end
  if all > most_bytes then table.sort(entries, function(a, b) return a[2] < b[2] end) end
  local piece, size, left = {}, 0, most_bytes
  for _, entry in ipairs(entries) do
    left = left - entry[2]
    if left < 0 then break end
    if #piece >= PIECE_ENTRIES or (size > 0 and size + entry[2] > PIECE_BYTES) then
      pieces[#pieces + 1], pieces[#pieces + 2] = kind, cjson.encode(piece)
      piece, size = {}, 0
    end
    piece[#piece + 1], size = entry[1], size + entry[2]
  end
  if #piece > 0 then pieces[#pieces + 1], pieces[#pieces + 2] = kind, cjson.encode(piece) end
end
local function note(event, entry)
  if #answer.notes < 32 then answer.notes[#answer.notes + 1] = {event, entry} end
end

local routers = redis.call('HGETALL', ROUTERS)
if redis.call('HLEN', CREDITS) > #routers / 2 then
  for _, name in ipairs(redis.call('HKEYS', CREDITS)) do
    if redis.call('HEXISTS', ROUTERS, name) == 0 then redis.call('HDEL', CREDITS, name) end
  end
end
local names, changed = {}, {}
for i = 1, #routers, 2 do
  local name = routers[i]
  if is_alive(routers[i + 1], now) and #name <= report.longest_name then
    if name ~= report.router then
      names[#names + 1] = {name, #name}
      local known = report.known[name]
      if not known or version_in(routers[i + 1]) ~= known then changed[#changed + 1] = name end
    end
  else
    redis.call('HDEL', CREDITS, name)
    if expires_at(routers[i + 1], now) + keep_ms < now then redis.call('HDEL', ROUTERS, name) end
  end
end
tell('routers', names, TOLD_BYTES)
local sizes = {}
for i = #changed, 1, -1 do
  local name = changed[i]
  sizes[name] = redis.call('HSTRLEN', CREDITS, name)
  if sizes[name] == 0 or sizes[name] > report.most_credit_bytes then
    if sizes[name] > 0 then note('credits in the shared state are too large to be read', name) end
    table.remove(changed, i)
  end
end
local heard = {}
-- Reads the credits of these routers in order and keeps new ones. Returns the index of the first without room, if any.
local function hear(names)
  local to_read, to_tell = TOLD_BYTES, TOLD_BYTES / 2
  for i, name in ipairs(names) do
    local size = sizes[name]
    if size > to_read or size + #name > to_tell then return i end
    to_read = to_read - size
    local text = redis.call('HGET', CREDITS, name)
    local version = whole(string.match(text, '^(%d+)|'))
    if version and report.known[name] ~= version then
      to_tell = to_tell - size - #name
      heard[#heard + 1] = {{name, version, (string.gsub(text, '^%d+|', ''))}, size + #name}
    end
  end
end
-- Half of the room is used in turns, beginning with the first router that the previous sync had no room for, so that
-- each router is read within a bounded number of syncs. The other half goes to the smallest credits of the rest, so
-- that these are read at once.
table.sort(changed, function(a, b)
  local a_waits, b_waits = a >= report.heard_until, b >= report.heard_until
  if a_waits ~= b_waits then return a_waits end
  return a < b
end)
local stopped = hear(changed)
if stopped then
  local rest = {unpack(changed, stopped)}
  answer.heard_until = rest[1]
  table.sort(rest, function(a, b) return sizes[a] < sizes[b] end)
  stopped = hear(rest)
  if stopped then note('the shared state has more credits than one sync reads: routers are read in turns', '') end
end
tell('changed', heard, TOLD_BYTES)

-- Leases of workers by address: 'expiry|lease as JSON'.
if report.leases then
  local changed = false
  for _, lease in ipairs(report.leases) do
    local address, what = lease[1], lease[2]
    local before = redis.call('HGET', LEASES, address)
    if not before or string.gsub(before, '^%d+|', '') ~= what then changed = true end
    redis.call('HSET', LEASES, address, string.format('%.0f|', now + report.ttl_ms) .. what)
  end
  local leases = redis.call('HGETALL', LEASES)
  for i = 1, #leases, 2 do
    if not is_alive(leases[i + 1], now) or #leases[i] + #leases[i + 1] > report.longest_name then
      redis.call('HDEL', LEASES, leases[i])
      changed = true
    end
  end
  if changed then bump('leases') end
  redis.call('PEXPIRE', LEASES, keep_ms)
end

-- Convictions by expiry. Twice the longest lifetime is allowed, because the clock may have been set back meanwhile.
local last_ms = now + 2 * report.most_conviction_ms
if redis.call('ZREMRANGEBYSCORE', CONVICTIONS, string.format('(%.0f', last_ms), '+inf') > 0 then
  cleared[#cleared + 1] = CONVICTIONS
end
if #report.convictions > 0 then
  local added = 0
  for _, conviction in ipairs(report.convictions) do
    local ttl_ms = math.min(conviction[2], report.most_conviction_ms)
    added = added + redis.call('ZADD', CONVICTIONS, 'GT', string.format('%.0f', now + ttl_ms), conviction[1])
  end
  if added > 0 then bump('convictions') end
  -- Until the last of them expires.
  local last = tonumber(redis.call('ZRANGE', CONVICTIONS, -1, -1, 'WITHSCORES')[2])
  redis.call('PEXPIRE', CONVICTIONS, string.format('%.0f', math.max(1, last - now)))
end

-- Versions outlive what they count: a version that began again at 0 could be mistaken for an old one.
redis.call('PEXPIRE', VERSIONS, 100 * keep_ms)
local versions = redis.call('HMGET', VERSIONS, 'leases', 'convictions')
answer.leases_version, answer.convictions_version = whole(versions[1]) or 0, whole(versions[2]) or 0
if answer.leases_version ~= report.known_leases then
  answer.has_leases = true
  local leases, entries = redis.call('HGETALL', LEASES), {}
  for i = 1, #leases, 2 do
    local size = #leases[i] + #leases[i + 1]
    if size <= report.longest_name then
      entries[#entries + 1] = {{leases[i], (string.gsub(leases[i + 1], '^%d+|', ''))}, size}
    end
  end
  tell('leases', entries, TOLD_BYTES)
end
local extra = redis.call('ZCARD', CONVICTIONS) - report.most_convictions
if extra > 0 then redis.call('ZREMRANGEBYRANK', CONVICTIONS, 0, extra - 1) end
redis.call('ZREMRANGEBYSCORE', CONVICTIONS, '-inf', now)
if answer.convictions_version ~= report.known_convictions then
  answer.has_convictions = true
  local convictions, entries = redis.call('ZRANGE', CONVICTIONS, 0, -1, 'WITHSCORES'), {}
  for i = 1, #convictions, 2 do
    local name, ttl_ms = convictions[i], tonumber(convictions[i + 1]) - now
    if #name <= LONGEST_FINGERPRINT then
      entries[#entries + 1] = {{name, math.min(ttl_ms, report.most_conviction_ms)}, #name}
    else
      redis.call('ZREM', CONVICTIONS, name)
    end
  end
  tell('convictions', entries, TOLD_BYTES)
end

-- Decayed service by tenant: 'value@time'.
local function decayed(text)
  local value, at = string.match(text, '^(%d+%.?%d*)@(%d+)$')
  at = whole_until(at, now + MOST_TTL_MS)
  if not at or #value > 18 then return 0 end
  return tonumber(value) * 0.5 ^ (math.max(0, now - at) / report.half_life_ms)
end
if is_new then
  for tenant, amount in pairs(report.served) do
    local before = redis.call('HGET', SERVED, tenant)
    local value = amount + (before and decayed(before) or 0)
    redis.call('HSET', SERVED, tenant, string.format('%.3f@%.0f', value, now))
    redis.call('PEXPIRE', SERVED, keep_ms)
  end
end
if report.wants_served then
  answer.has_served = true
  local served = redis.call('HGETALL', SERVED)
  local all = {}
  for i = 1, #served, 2 do
    local value = decayed(served[i + 1])
    if value < 1 or #served[i] > report.longest_name then redis.call('HDEL', SERVED, served[i]) else all[#all + 1] = {served[i], value} end
  end
  if #all > report.most_tenants then
    table.sort(all, function(a, b) return a[2] > b[2] end)
    for i = report.most_tenants + 1, #all do
      redis.call('HDEL', SERVED, all[i][1])
      all[i] = nil
    end
  end
  local entries = {}
  for _, pair in ipairs(all) do entries[#entries + 1] = {{pair[1], pair[2]}, #pair[1]} end
  tell('served', entries, TOLD_BYTES)
end
for _, key in ipairs(cleared) do note('invalid content was cleared from the shared state', key) end
pieces[1] = cjson.encode(answer)
return pieces
