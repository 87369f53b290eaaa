"""Finds requests: of this process, of the others of its router, and of the other routers of the fleet."""
