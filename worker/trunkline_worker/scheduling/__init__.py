"""Which sequences run, and what each step computes of them. Pure."""
