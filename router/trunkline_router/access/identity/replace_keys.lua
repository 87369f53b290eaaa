-- Replaces sealed records of API keys that are still as they were read.
-- KEYS: records (hash: key id → sealed record), version (string: changes with each write)
-- ARGV: new version, then id, record that was read, new record, id, …
-- Returns the number of replaced records.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
  return 0
end
local replaced = 0
for i = 2, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    replaced = replaced + 1
  end
end
if replaced > 0 then
  redis.call('SET', KEYS[2], ARGV[1])
end
return replaced
