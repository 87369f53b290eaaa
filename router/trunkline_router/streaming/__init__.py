"""From what workers say to what a client reads."""
