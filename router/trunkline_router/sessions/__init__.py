"""The stream of requests and news between a router and a worker."""
