"""The cost of serving models by the Open Inference Protocol: `python -m benchmarks.oip`."""
