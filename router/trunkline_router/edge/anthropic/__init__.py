"""Anthropic's API: requests become GenerateRequests, responses become messages and server-sent events."""
