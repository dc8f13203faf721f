"""A driver in a process of its own: the protocol, its two ends, and the start and end of the process."""
