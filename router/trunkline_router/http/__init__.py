"""HTTP/1.1: the server, its limits, JSON bodies, server-sent events, and errors."""
