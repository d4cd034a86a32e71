"""OpenVINO, imported so that it reports nothing."""

import sys
from typing import Any


def import_openvino() -> Any:
    """Return the module `openvino`. Raises ImportError if it is not installed.

    With the package openvino_telemetry it reports every import to a web service; without it, it does not.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino
