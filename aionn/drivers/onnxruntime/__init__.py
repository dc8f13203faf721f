"""Driver ``ort-cpu``, and ``ort-*`` for ONNX Runtime's other execution providers."""
