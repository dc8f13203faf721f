"""What the machine and the process below give: the event loop, threads, files, and work that a clock cannot see."""
