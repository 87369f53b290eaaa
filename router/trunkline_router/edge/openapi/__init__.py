"""The OpenAPI page: what the HTTP API takes and answers, for generators of clients and of tests."""
