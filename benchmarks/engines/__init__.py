"""The benchmark of engines: `python -m benchmarks.engines`."""
