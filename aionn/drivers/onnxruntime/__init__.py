"""Driver ``ort-cpu``, and ``ort-*`` for ONNX Runtime's other execution providers."""

import os

# Before anything imports ONNX Runtime: from version 1.29 on it keeps a database below the user's home otherwise, and sends what is
# in it to its makers. A value that the user has set stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
