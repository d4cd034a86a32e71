"""Makes what the tests of this folder share importable (`fuzzing`, `convolving`, `halves`); what multiplies pairs."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["unit", "multiply-adds"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies pairs of bfloat16: the unit, where there is one, and what stands in for it elsewhere."""
    from sparse_kernels.cpu import conv2d, linear, target

    if request.param == "unit":
        if not target.host().pairs:
            pytest.skip("this processor does not multiply pairs of bfloat16")
    else:
        own = replace(target.host(), pairs=False)
        for module in (linear, conv2d):
            monkeypatch.setattr(module, "host", lambda: own)
    return str(request.param)
