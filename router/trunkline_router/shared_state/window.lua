-- A tenant's sliding window, as quota.py has it: a hash of sums (r, t), the first bucket that may be there (first), and
-- requests and tokens by bucket (r<number>, t<number>). Both scripts begin with this.
local BUCKETS = 120

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
  local sums = redis.call('HMGET', key, 'r', 't', 'first')
  window.requests, window.tokens = tonumber(sums[1]) or 0, tonumber(sums[2]) or 0
  window.first = tonumber(sums[3])
  local oldest = window.current - BUCKETS
  if window.first and window.first < oldest then
    if window.first < oldest - 2 * BUCKETS then
      redis.call('DEL', key)
      window.requests, window.tokens, window.first = 0, 0, nil
    else
      local fields = bucket_fields(window.first, oldest - 1)
      local values = redis.call('HMGET', key, unpack(fields))
      local requests, tokens = 0, 0
      for i = 1, #values, 2 do
        requests = requests + (tonumber(values[i]) or 0)
        tokens = tokens + (tonumber(values[i + 1]) or 0)
      end
      redis.call('HDEL', key, unpack(fields))
      -- Nothing is taken from nothing as "-0", which is no integer to Redis.
      if requests ~= 0 then window.requests = redis.call('HINCRBY', key, 'r', -requests) end
      if tokens ~= 0 then window.tokens = redis.call('HINCRBY', key, 't', -tokens) end
      window.first = oldest
      redis.call('HSET', key, 'first', string.format('%.0f', oldest))
    end
  end
  return window
end

local function add_to_window(window, number, requests, tokens)
  if requests ~= 0 then
    redis.call('HINCRBY', window.key, string.format('r%.0f', number), requests)
    window.requests = redis.call('HINCRBY', window.key, 'r', requests)
  end
  if tokens ~= 0 then
    redis.call('HINCRBY', window.key, string.format('t%.0f', number), tokens)
    window.tokens = redis.call('HINCRBY', window.key, 't', tokens)
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
    requests = requests - (tonumber(values[i]) or 0)
    tokens = tokens - (tonumber(values[i + 1]) or 0)
    if requests <= 0 and tokens <= 0 then
      local number = window.first + (i - 1) / 2
      return math.max(1, math.floor((number + 1) * window.width + window.length - now) + 1)
    end
  end
  return window.length
end

local function is_alive(entry, now)
  local expires = entry and tonumber(string.match(entry, '^(%d+):'))
  return expires and expires > now
end
