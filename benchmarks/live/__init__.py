"""The benchmark of live sources: `python -m benchmarks.live`."""
