"""From a client's request to what workers are asked."""
