"""From credentials to identities: API keys (in a file or in Redis) and tokens (JWT) of other issuers.

`authenticator.py` is the door. `identity.py` defines what it returns.
"""
