"""KV blocks, the prefixes they hold, and the sequences that refer to them. Pure."""
