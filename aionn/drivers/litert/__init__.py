"""Driver ``litert-cpu``: models on LiteRT's CPU kernels and XNNPACK."""
