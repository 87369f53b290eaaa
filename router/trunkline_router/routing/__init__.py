"""Which worker gets a request. Pure."""
