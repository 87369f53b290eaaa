"""The state of the fleet and of recent requests, for its watchers: operators, users, the live page."""
