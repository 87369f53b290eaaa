"""The worker's calls, and the requests that came through them."""
