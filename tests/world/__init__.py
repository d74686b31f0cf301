"""The injected world: the whole system in one thread, on virtual time, from one seed."""
