"""The order of jobs on devices, and the early rejection of jobs that cannot meet their deadlines."""
