"""Anthropic's API over HTTP: messages, and their number of tokens."""
