-- Writes sealed records of API keys, each only in place of the one that the writer has read.
-- KEYS: records (hash: key id → sealed record), version (string: changes with each write)
-- ARGV: new version, then id, digest of the record to replace ("" for none, * for any), new record, id, …
-- Returns the number of written records.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'hash' then
  redis.call('DEL', KEYS[1])
end
local written = 0
for i = 2, #ARGV, 3 do
  local old = redis.call('HGET', KEYS[1], ARGV[i])
  if ARGV[i + 1] == '*' or ARGV[i + 1] == (old and redis.sha1hex(string.sub(old, 1, 65536)) or '') then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    written = written + 1
  end
end
if written > 0 then
  redis.call('SET', KEYS[2], ARGV[1])
end
return written
