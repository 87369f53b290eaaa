"""A GPU that is not there: the real runner on tensors without memory. Each call is checked against a device's rules."""
