"""The live page in a real Chromium, before a router and workers of real processes."""
