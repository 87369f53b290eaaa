"""A GPU that is not there: the real runner on tensors without memory, and every rule of a device checked at each call."""
