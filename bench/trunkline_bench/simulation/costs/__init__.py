"""Cost models: how long a step takes, by what it computes."""
