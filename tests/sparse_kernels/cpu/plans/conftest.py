"""What multiplies pairs of bfloat16: each of the two ways in turn."""

from dataclasses import replace

import pytest

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target

# Where the unit runs all, what stands in for it elsewhere can wait: each kernel takes seconds to compile.
LATER = [pytest.mark.slow] if find_cpu_target().pairs else []


@pytest.fixture(params=["unit", pytest.param("multiply-adds", marks=LATER)])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies pairs of bfloat16: the unit, where there is one, and what stands in for it elsewhere."""
    from sparse_kernels.cpu.plans import conv2d, linear

    if request.param == "unit":
        if not find_cpu_target().pairs:
            pytest.skip("this processor does not multiply pairs of bfloat16")
    else:
        own = replace(find_cpu_target(), pairs=False)
        for module in (linear, conv2d):
            monkeypatch.setattr(module, "find_cpu_target", lambda: own)
    return str(request.param)
