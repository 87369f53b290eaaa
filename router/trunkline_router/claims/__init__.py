"""Whether what a worker says can be true."""
