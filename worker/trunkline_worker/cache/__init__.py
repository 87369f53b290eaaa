"""KV blocks, the prefixes that they hold, and the sequences that refer to them. Pure."""
