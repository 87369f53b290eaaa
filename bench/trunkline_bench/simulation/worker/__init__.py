"""One simulated worker: the real engine in virtual time."""
