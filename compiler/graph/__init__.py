"""The graph: what it may hold, and how it is executed by the oracle, onnxruntime."""

import os

# onnxruntime from 1.32 on writes a device id into the user's cache folder and sends usage data,
# unless it is told not to before it is imported
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
