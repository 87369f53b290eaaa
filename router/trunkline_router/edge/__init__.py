"""What the HTTP endpoints have in common: from a request on a connection to one that the router serves."""
