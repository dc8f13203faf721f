"""The benchmark of capacity: `python -m benchmarks.capacity`."""
