"""How long clients and applications that behave well wait beside hostile peers: `python -m benchmarks.hostile`."""
