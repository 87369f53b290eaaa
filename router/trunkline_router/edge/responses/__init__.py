"""OpenAI's Responses API: requests become GenerateRequests; answers are objects that can be stored and continued."""
