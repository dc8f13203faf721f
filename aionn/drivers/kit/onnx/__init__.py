"""Models as ONNX models: the lowering that drivers share whose engine reads ONNX."""
