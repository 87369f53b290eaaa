"""The HTTP server itself: connections, and what arrives and leaves on them."""
