-- The common part of both scripts: checks of the keys behind the fleet's prefix, and a tenant's sliding window as in
-- quota.py. A window is a hash of sums (r, t), the first bucket that may exist (first), and requests and tokens by bucket
-- (r<number>, t<number>).
local BUCKETS = 120

-- Other programs may write to the same keys. Content that no router can have written is ignored and cleared, so that one
-- bad entry does not make every later script fail.
-- The largest numbers of routers (including those that ended within KEEP_MS), of leases and of buckets in a window.
-- Every sync reads each router, once a second a sync of each router reads each lease, and every request reads the window
-- and the tokens in flight. Larger keys do not belong to a real fleet and would delay Redis.
local MOST_FIELDS, MOST_ROUTERS, MOST_LEASES, MOST_BUCKETS, LONGEST = 65536, 1024, 4096, 1024, 1048576
local cleared = {}

-- Clears a key that has another type or too many entries. Sets an expiry on a key that has none.
local function claim(key, kind, keep_ms, most)
  local found = redis.call('TYPE', key).ok
  if found == 'none' then return end
  if found ~= kind or redis.call(kind == 'hash' and 'HLEN' or 'ZCARD', key) > most then
    redis.call('UNLINK', key)
    cleared[#cleared + 1] = key
  elseif redis.call('PTTL', key) == -1 then
    redis.call('PEXPIRE', key, keep_ms)
  end
end

-- The string at a key, or false if there is none or it is too long.
local function text_in(key)
  if redis.call('TYPE', key).ok ~= 'string' or redis.call('STRLEN', key) > LONGEST then return false end
  return redis.call('GET', key)
end

-- A whole number that JSON carries exactly, or nil. Lua's tonumber also accepts 'nan', 'inf', '0x1p9' and a million
-- digits.
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%-?%d+$') and tonumber(text) or nil
end

local function whole_until(text, most)
  local number = whole(text)
  return number and number <= most and number or nil
end

-- HINCRBY that starts from 0 if the field is not a whole number.
local function add(key, field, amount)
  if not whole(redis.call('HGET', key, field) or '0') then redis.call('HDEL', key, field) end
  return redis.call('HINCRBY', key, field, string.format('%.0f', amount))
end

local function clock(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function bucket_fields(first, last)
  local fields = {}
  for number = first, last do
    fields[#fields + 1] = string.format('r%.0f', number)
    fields[#fields + 1] = string.format('t%.0f', number)
  end
  return fields
end

-- Removes the buckets that have left the window and returns the window as a table.
local function open_window(key, window_ms, now)
  local width = math.max(1, math.floor(window_ms / BUCKETS))
  local window = {key = key, width = width, length = window_ms, current = math.floor(now / width)}
  local oldest = window.current - BUCKETS
  local sums = redis.call('HMGET', key, 'r', 't', 'first')
  window.requests, window.tokens, window.first = whole(sums[1]) or 0, whole(sums[2]) or 0, whole(sums[3])
  -- Sums that would never expire: their first bucket is unknown, or the clock was set back by more than a window.
  if (sums[1] or sums[2]) and not whole_until(sums[3], window.current + BUCKETS) then window.first = 0 end
  if window.first and window.first < oldest then
    if window.first < oldest - 2 * BUCKETS then
      redis.call('DEL', key)
      window.requests, window.tokens, window.first = 0, 0, nil
    else
      local fields = bucket_fields(window.first, oldest - 1)
      local values = redis.call('HMGET', key, unpack(fields))
      local requests, tokens = 0, 0
      for i = 1, #values, 2 do
        requests = requests + (whole(values[i]) or 0)
        tokens = tokens + (whole(values[i + 1]) or 0)
      end
      redis.call('HDEL', key, unpack(fields))
      -- A change of 0 would be formatted as "-0", which Redis does not accept as an integer.
      if requests ~= 0 then window.requests = add(key, 'r', -requests) end
      if tokens ~= 0 then window.tokens = add(key, 't', -tokens) end
      window.first = oldest
      redis.call('HSET', key, 'first', string.format('%.0f', oldest))
    end
  end
  return window
end

local function add_to_window(window, number, requests, tokens)
  if requests ~= 0 then
    add(window.key, string.format('r%.0f', number), requests)
    window.requests = add(window.key, 'r', requests)
  end
  if tokens ~= 0 then
    add(window.key, string.format('t%.0f', number), tokens)
    window.tokens = add(window.key, 't', tokens)
  end
  if not window.first or number < window.first then
    window.first = number
    redis.call('HSET', window.key, 'first', string.format('%.0f', number))
  end
  redis.call('PEXPIRE', window.key, 2 * window.length)
end

-- Time in ms until this many requests and tokens have left the window.
local function free_in(window, now, requests, tokens)
  -- The second condition holds if the server's clock was set back.
  if not window.first or window.first > window.current then return window.length end
  local values = redis.call('HMGET', window.key, unpack(bucket_fields(window.first, window.current)))
  for i = 1, #values, 2 do
    requests = requests - (whole(values[i]) or 0)
    tokens = tokens - (whole(values[i + 1]) or 0)
    if requests <= 0 and tokens <= 0 then
      local number = window.first + (i - 1) / 2
      return math.max(1, math.floor((number + 1) * window.width + window.length - now) + 1)
    end
  end
  return window.length
end

-- The longest lifetime of an entry that a router writes.
local MOST_TTL_MS = 600000

local function expires_at(entry, now)
  return entry and whole_until(string.match(entry, '^(%d+)[:|]'), now + MOST_TTL_MS) or 0
end

local function is_alive(entry, now)
  return expires_at(entry, now) > now
end
