"""What a scraper is answered: metrics counted at the ends of requests and read from the router, over its processes."""
