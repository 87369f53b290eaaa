-- Writes sealed records of API keys.
-- KEYS: records (hash: key id → sealed record), version (string: changes with each write)
-- ARGV: new version, then id, record, id, record, …
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  redis.call('DEL', KEYS[1])
end
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('SET', KEYS[2], ARGV[1])
return 'written'
