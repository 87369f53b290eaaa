"""Who may call, and how much is taken in."""
