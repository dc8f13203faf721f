"""Drivers ``openvino-cpu``, ``openvino-gpu`` and ``openvino-npu``."""
