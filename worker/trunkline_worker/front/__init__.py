"""The worker's RPCs, and the requests that arrive through them."""
