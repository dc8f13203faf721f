"""How each ONNX operator is written as operations of the HAL, one file for related operators."""
