"""What router replicas share: quotas, credits, fairness, leases of workers, and convictions.

`state.py` is what the rest of the router talks to. It asks a store (see `stores`): Redis where there is one, else one
in this process. In the background `sync.py` has store and router inform each other; the router's side of that is
`pool_fleet.py`. Whatever a store holds is advisory or expires, and a router can enter its own part of it again at any
time.
"""
