"""HTTP, gRPC and the protocols on them: translations to and from one request that the router serves."""
