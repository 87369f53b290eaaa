"""The state that router replicas share: quotas, credits, fairness, leases of workers, and convictions.

The rest of the router uses `state.py`, which asks a store (see `stores`): Redis if it is configured, else one in this
process. In the background `sync.py` exchanges state between store and router; `pool_fleet.py` is the router's side of
that. Everything in a store is advisory or expires, and a router can enter its own part again at any time.
"""
