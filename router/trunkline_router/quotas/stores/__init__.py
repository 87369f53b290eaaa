"""The stores of the state that routers share: Redis (`redis_store.py`), or process memory (`embedded_store.py`).

`store.py` defines the interface.
"""
