-- Both scripts begin with this: what there may be behind the fleet's prefix, and a tenant's sliding window, as quota.py
-- has it: a hash of sums (r, t), the first bucket that may be there (first), and requests and tokens by bucket (r<number>,
-- t<number>).
local BUCKETS = 120

-- Whoever can write to Redis can write anything. What no router can have written is taken for nothing and cleared, so
-- that one entry does not fail every script from then on.
-- The most routers of a fleet, those that ended within KEEP_MS included, the most leases, and the most buckets of a
-- window. Every sync looks at each router, every second one of each router at each lease, and every request at the
-- window and the tokens in flight: what is longer is no fleet's, and would hold up Redis.
local MOST_FIELDS, MOST_ROUTERS, MOST_LEASES, MOST_BUCKETS, LONGEST = 65536, 1024, 4096, 1024, 1048576
local cleared = {}

-- Clears a key of another type, or one that has grown beyond all measure. A key that does not expire is given a time.
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

-- A string, or nothing.
local function text_in(key)
  if redis.call('TYPE', key).ok ~= 'string' or redis.call('STRLEN', key) > LONGEST then return false end
  return redis.call('GET', key)
end

-- A whole number as JSON carries it exactly, or nil: Lua reads 'nan', 'inf', '0x1p9' and a million digits too.
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%-?%d+$') and tonumber(text) or nil
end

local function whole_until(text, most)
  local number = whole(text)
  return number and number <= most and number or nil
end

-- HINCRBY, from 0 where there was no whole number.
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

-- Forgets what has left the window. Returns it as a table.
local function open_window(key, window_ms, now)
  local width = math.max(1, math.floor(window_ms / BUCKETS))
  local window = {key = key, width = width, length = window_ms, current = math.floor(now / width)}
  local oldest = window.current - BUCKETS
  local sums = redis.call('HMGET', key, 'r', 't', 'first')
  window.requests, window.tokens, window.first = whole(sums[1]) or 0, whole(sums[2]) or 0, whole(sums[3])
  -- Sums that would never leave: nobody knows when they began, or the clock was set back by more than they last.
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
      -- Nothing is taken from nothing as "-0", which is no integer to Redis.
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

-- When so much of what is counted will have left, in ms.
local function free_in(window, now, requests, tokens)
  -- The second: the server's clock was set back.
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

-- Nothing that a router writes lives for longer.
local MOST_TTL_MS = 600000

local function expires_at(entry, now)
  return entry and whole_until(string.match(entry, '^(%d+)[:|]'), now + MOST_TTL_MS) or 0
end

local function is_alive(entry, now)
  return expires_at(entry, now) > now
end
