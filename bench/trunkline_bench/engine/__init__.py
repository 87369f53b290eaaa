"""One worker on this machine: its throughput beside peers, its host time per step, overload."""
