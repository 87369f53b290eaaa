-- Writes sealed records of API keys.
-- KEYS: records (hash: key id → sealed record), version (string: changes with each write)
-- ARGV: new version, the version that must be there ("" stands for none, * for any), then id, record, id, record, …
-- Returns 1; 0 if another program has written meanwhile, and then it changes nothing.
local version = redis.pcall('GET', KEYS[2])
if type(version) ~= 'string' or #version > 64 or not string.match(version, '^%x+$') then
  version = ''
end
if ARGV[2] ~= '*' and ARGV[2] ~= version then
  return 0
end
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  redis.call('DEL', KEYS[1])
end
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('SET', KEYS[2], ARGV[1])
return 1
