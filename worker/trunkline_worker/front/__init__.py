"""The worker's RPCs, the requests that arrive through them, and the text of their answers."""
