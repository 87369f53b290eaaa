-- One page of the sealed records of API keys.
-- KEYS: records (hash: key id → sealed record), version (string: changes with each write)
-- ARGV: the version that the router knows ("" reads in any case), cursor, number of records of a page, size limit of one
-- Returns the version alone if it is the known one, else version, next cursor ("0" after the last page), and
-- [id, record, digest, id, …] as JSON. A record over the limit is empty. The digest is the SHA-1 of the first 64 KiB,
-- which is more than any valid record has.
local version = redis.pcall('GET', KEYS[2])
if type(version) ~= 'string' or #version > 64 or not string.match(version, '^%x+$') then
  version = ''
end
if version ~= '' and version == ARGV[1] then
  return {version}
end
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
  return {version, '0', '[]'}
end
local page = redis.call('HSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
local most, found = tonumber(ARGV[4]), {}
for i = 1, #page[2], 2 do
  local id, record = page[2][i], page[2][i + 1]
  if #id <= 64 then
    found[#found + 1] = id
    found[#found + 1] = #record <= most and record or ''
    found[#found + 1] = redis.sha1hex(string.sub(record, 1, 65536))
  end
end
return {version, page[1], #found > 0 and cjson.encode(found) or '[]'}
