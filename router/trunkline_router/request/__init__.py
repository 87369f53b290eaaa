"""From a request to its last token: checks, grants, dispatch to workers, failover and streaming."""
