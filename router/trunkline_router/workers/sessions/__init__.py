"""The Session stream between a router and a worker: submits and aborts one way, outputs the other."""
