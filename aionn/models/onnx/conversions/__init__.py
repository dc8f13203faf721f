"""Conversions of ONNX operators to operations of the HAL, one file for related operators."""
