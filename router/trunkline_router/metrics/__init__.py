"""A router's metrics: counted at the ends of requests, read from its parts at a scrape, merged over its processes."""
