"""OpenAI's API: requests become GenerateRequests, responses become JSON and server-sent events."""
