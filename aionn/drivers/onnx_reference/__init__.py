"""The device ``onnx-reference``: the operations of the extension ``ai.onnx`` by numpy."""
