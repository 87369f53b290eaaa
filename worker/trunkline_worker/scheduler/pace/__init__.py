"""What a step costs, and how much fits into one. Pure."""
