-- Counts a request against its tenant's quotas, or returns the quota that is used up.
-- KEYS: life, routers, the tenant's window, the tenant's tokens in flight by router
-- ARGV: life, now (empty: the server's), window_ms, router, tokens, tokens in flight of the router's other requests,
--       requests per minute, tokens per minute, tokens in flight (each empty for no limit), retry_ms,
--       refused tokens, see Ask.refused (empty: the router has no other reservation of the tenant under way)
-- Returns {'lost'}, or {'granted' | the quota's name, retry_ms, requests, tokens, in flight, time bucket}.
if text_in(KEYS[1]) ~= ARGV[1] then return {'lost'} end
local now, length, router = clock(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local wanted, mine = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_requests, most_tokens, most_in_flight = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
for key, most in pairs({[2] = MOST_ROUTERS, [3] = MOST_BUCKETS, [4] = 2 * MOST_ROUTERS}) do
  claim(KEYS[key], 'hash', 2 * length, most)
end
local window = open_window(KEYS[3], length, now)

-- Next to a router's tokens in flight, this field counts tokens that were refused while the router had other
-- reservations under way. Refusals that it does not know of yet are in its tokens in flight and must be subtracted.
local REFUSED = '|refused'
local known, refused = tonumber(ARGV[11]), nil
local others = 0
local entries = redis.call('HGETALL', KEYS[4])
for i = 1, #entries, 2 do
  if entries[i] == router .. REFUSED then
    refused = whole(entries[i + 1])
  elseif entries[i] ~= router then
    local name = string.gsub(entries[i], REFUSED .. '$', '')
    if is_alive(redis.call('HGET', KEYS[2], name), now) then
      if name == entries[i] then others = others + math.max(0, whole(entries[i + 1]) or 0) end
    else
      redis.call('HDEL', KEYS[4], entries[i])
    end
  end
end

if known == nil and refused then redis.call('HDEL', KEYS[4], router .. REFUSED) end
known = known or 0
refused = ARGV[11] ~= '' and refused or known
mine = math.max(0, mine - math.max(0, refused - known))
local in_flight = others + mine

local function refuse(quota, retry_ms)
  redis.call('HSET', KEYS[4], router .. REFUSED, string.format('%.0f', refused + wanted))
  redis.call('PEXPIRE', KEYS[4], 2 * length)
  return {quota, retry_ms, window.requests, window.tokens, in_flight, window.current}
end

if most_requests and window.requests + 1 > most_requests then
  return refuse('requests_per_minute', free_in(window, now, window.requests + 1 - most_requests, 0))
end
if most_tokens and window.tokens + wanted > most_tokens then
  return refuse('tokens_per_minute', free_in(window, now, 0, window.tokens + wanted - most_tokens))
end
if most_in_flight and in_flight + wanted > most_in_flight then
  return refuse('tokens_in_flight', tonumber(ARGV[10]))
end
add_to_window(window, window.current, 1, wanted)
redis.call('HSET', KEYS[4], router, string.format('%.0f', mine + wanted))
redis.call('PEXPIRE', KEYS[4], 2 * length)
return {'granted', 0, window.requests, window.tokens, in_flight + wanted, window.current}
