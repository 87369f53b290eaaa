"""What router replicas share: quotas, credits, fairness, leases of workers, and convictions.

`state.py` is what the rest of the router talks to. It asks a store (`store.py` says what one does): `redis_store.py`
where there is a Redis, else `embedded_store.py`, in this process. In the background `sync.py` has store and router
inform each other; the router's side of that is `pool_fleet.py`. Whatever a store holds is advisory or expires, and a
router can enter its own part of it again at any time.
"""
