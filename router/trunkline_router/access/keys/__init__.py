"""`trunkline keys`: creates, lists and revokes API keys, and seals those in Redis anew."""
