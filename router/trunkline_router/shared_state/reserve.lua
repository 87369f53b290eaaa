-- Counts a request against its tenant's quotas, or says which one is used up.
-- KEYS: life, routers, the tenant's window, the tenant's tokens in flight by router
-- ARGV: life, now (empty: the server's), window_ms, router, tokens, tokens in flight of the router's other requests,
--       requests per minute, tokens per minute, tokens in flight (each empty where there is no limit), retry_ms
-- Returns {'lost'}, or {'granted' | the quota's name, retry_ms, requests, tokens, in flight}.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'lost'} end
local now, length, router = clock(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local wanted, mine = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_requests, most_tokens, most_in_flight = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local window = open_window(KEYS[3], length, now)

local in_flight = mine
local entries = redis.call('HGETALL', KEYS[4])
for i = 1, #entries, 2 do
  if entries[i] ~= router then
    if is_alive(redis.call('HGET', KEYS[2], entries[i]), now) then
      in_flight = in_flight + (tonumber(entries[i + 1]) or 0)
    else
      redis.call('HDEL', KEYS[4], entries[i])
    end
  end
end

local function refuse(quota, retry_ms)
  return {quota, retry_ms, window.requests, window.tokens, in_flight}
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
return {'granted', 0, window.requests, window.tokens, in_flight + wanted}
