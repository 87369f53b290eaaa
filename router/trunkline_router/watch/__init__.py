"""The state of the fleet and of recent requests, for those who watch it: operators, users, the live page."""
