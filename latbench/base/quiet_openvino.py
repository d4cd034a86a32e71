"""OpenVINO, imported so that it reports nothing."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_openvino() -> Any:
    """Return the module `openvino`. Raises ImportError if it is not installed.

    With the package openvino_telemetry it reports every import to a web service; without it, it does not.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


@contextmanager
def keep_root_logger() -> Iterator[None]:
    """Leave the root logger as it was: OpenVINO's importer silences it, for good where it refuses a model."""
    root = logging.getLogger()
    before = root.level, root.filters[:], root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(before[0])
        root.filters, root.handlers = before[1:]
