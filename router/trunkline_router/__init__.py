"""The router: edge, prefix index, routing policy, worker sessions."""
