"""From a call's credential to an identity: API keys and JSON Web Tokens."""
