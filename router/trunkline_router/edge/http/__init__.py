"""HTTP/1.1 for applications: headers, JSON bodies, server-sent events, and errors."""
