"""Load on the HTTP port by aiperf, a client that was not written here."""
