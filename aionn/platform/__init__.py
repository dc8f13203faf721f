"""The services of the machine and the process below: the event loop, threads, files, and work that a clock cannot see."""
