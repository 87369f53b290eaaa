"""Where routers keep what they share: `redis_store.py` where there is a Redis, else `embedded_store.py` in the process.

`store.py` says what a store does.
"""
