"""Measures a model on devices: latency, throughput, compilation, memory, and answers against LiteRT's."""
