"""The router: time per routing decision, and quotas over two router processes."""
