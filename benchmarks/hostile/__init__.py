"""The waits of clients and applications that behave well, beside hostile peers: `python -m benchmarks.hostile`."""
