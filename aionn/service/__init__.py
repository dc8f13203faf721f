"""A driver in a process of its own: what is said between the processes, either end of it, and who starts and ends the process."""
