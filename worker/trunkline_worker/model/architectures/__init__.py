"""What a model computes, as data, and how its config.json says so: what all families have in common."""
