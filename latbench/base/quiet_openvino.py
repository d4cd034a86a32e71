"""OpenVINO, imported so that it reports nothing.

With the package openvino_telemetry it reports every import to a web service; without it, it does not.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402

__all__ = ["openvino"]
