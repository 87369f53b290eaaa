-- Counts a request against its tenant's quotas, or returns the quota that is used up.
-- KEYS: life, routers, the tenant's window, the tenant's tokens in flight by router
-- ARGV: life, now (empty: the server's), window_ms, router, tokens, change of the router's tokens in flight,
--       requests per minute, tokens per minute, tokens in flight (each empty for no limit), retry_ms
-- Returns {'lost'}, or {'granted' | the quota's name, retry_ms, requests, tokens, in flight, time bucket}.
if text_in(KEYS[1]) ~= ARGV[1] then return {'lost'} end
local now, length, router, wanted = clock(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local most_requests, most_tokens, most_in_flight = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
for key, most in pairs({[2] = MOST_ROUTERS, [3] = MOST_BUCKETS, [4] = MOST_ROUTERS}) do
  claim(KEYS[key], 'hash', 2 * length, most)
end
local window = open_window(KEYS[3], length, now)

if ARGV[6] ~= '0' then add(KEYS[4], router, tonumber(ARGV[6])) end
local in_flight = 0
local entries = redis.call('HGETALL', KEYS[4])
for i = 1, #entries, 2 do
  if entries[i] == router or is_alive(redis.call('HGET', KEYS[2], entries[i]), now) then
    in_flight = in_flight + math.max(0, whole(entries[i + 1]) or 0)
  else
    redis.call('HDEL', KEYS[4], entries[i])
  end
end

local function answer(quota, retry_ms)
  redis.call('PEXPIRE', KEYS[4], 2 * length)
  return {quota, retry_ms, window.requests, window.tokens, in_flight, window.current}
end

if most_requests and window.requests + 1 > most_requests then
  return answer('requests_per_minute', free_in(window, now, window.requests + 1 - most_requests, 0))
end
if most_tokens and window.tokens + wanted > most_tokens then
  return answer('tokens_per_minute', free_in(window, now, 0, window.tokens + wanted - most_tokens))
end
if most_in_flight and in_flight + wanted > most_in_flight then
  return answer('tokens_in_flight', tonumber(ARGV[10]))
end
add_to_window(window, window.current, 1, wanted)
add(KEYS[4], router, wanted)
in_flight = in_flight + wanted
return answer('granted', 0)
