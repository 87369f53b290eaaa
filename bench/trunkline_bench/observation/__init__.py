"""What observation costs: a router and a worker with traces, metrics and a watcher, against the same ones without."""
