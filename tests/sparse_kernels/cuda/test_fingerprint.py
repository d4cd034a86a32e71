"""The fingerprint of a kernel family changes with what is compiled or launched, and with nothing else."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from sparse_kernels.cuda import build, family_fingerprint, sm90, variants, vector
from sparse_kernels.cuda.targets import ARCHITECTURES

HOPPER = "sm_90a"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the CUDA sources that a test may edit."""
    for path in build.KERNELS.glob("*.cu*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(build, "KERNELS", tmp_path)
    return tmp_path


@pytest.fixture
def launched_anew():
    """What is launched is worked out once in a process; a test that changes it has to forget it."""
    family_fingerprint._launched_digest.cache_clear()
    yield
    family_fingerprint._launched_digest.cache_clear()


def every(architecture: str = HOPPER, families: tuple[str, ...] = variants.FAMILIES) -> dict[str, str]:
    family_fingerprint._code.cache_clear()
    found = {family: family_fingerprint.fingerprint_family(family, architecture) for family in families}
    family_fingerprint._code.cache_clear()
    return found


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, 1))


def test_a_comment_or_white_space_in_a_source_changes_nothing(sources):
    before = every()
    for path in sources.glob("*.cu*"):
        path.write_text('// a new first line, with a "quote" and */\n' + path.read_text().replace("\n", "\n\n", 3))
        edit(path, ";\n", "; /* said\n here */ \n")
    assert every() == before
    assert all(len(digits) == family_fingerprint.DIGITS for digits in before.values())


@pytest.mark.parametrize(
    ("source", "families"),
    [
        ("vector.cu", {"vector"}),
        ("vector_few.cu", {"vector_few"}),
        ("vector_sm90.cu", {"vector_sm90"}),
        ("nm_sm90.cu", {"nm_sm90"}),
        ("csr.cu", {"csr"}),
        ("sm90.cuh", {"vector_sm90", "nm_sm90"}),
    ],
)
def test_code_changes_the_families_that_compile_it_and_no_others(sources, source, families):
    before = every()
    edit(sources / source, ";\n", "; { int more = 0; }\n")
    after = every()
    assert {family for family in before if before[family] != after[family]} == families


def test_a_text_that_looks_like_a_comment_stays(sources):
    (sources / "text.cu").write_text('const char *url = "http://x /* y */"; // gone\n')
    assert family_fingerprint.read_code("text.cu") == 'const char *url = "http://x /* y */";'


def test_a_compile_option_changes_all(sources, monkeypatch):
    before, options = every(), build.compile_options
    monkeypatch.setattr(build, "compile_options", lambda *it: [*options(*it), "--use_fast_math"])
    after = every()
    assert all(before[family] != after[family] for family in before)


def test_a_tile_is_seen_in_what_is_launched(launched_anew, monkeypatch):
    before = every("sm_80", ("vector", "csr"))
    family_fingerprint._launched_digest.cache_clear()
    monkeypatch.setitem(vector.WARPS, (64, 64), (1, 4))
    after = every("sm_80", ("vector", "csr"))
    assert {family for family in before if before[family] != after[family]} == {"vector"}


def test_packed_weights_are_seen_in_what_is_launched(launched_anew, monkeypatch):
    families = ("nm_sm90", "csr")
    before, swizzled = every(families=families), sm90.swizzle
    family_fingerprint._launched_digest.cache_clear()
    monkeypatch.setattr(sm90, "swizzle", lambda lines: np.ascontiguousarray(swizzled(lines)[..., ::-1]))
    after = every(families=families)
    assert {family for family in before if before[family] != after[family]} == {"nm_sm90"}


def test_every_architecture_has_fingerprints_of_its_own():
    found = [family_fingerprint.fingerprint_family("csr", name) for name in ARCHITECTURES]
    assert len(set(found)) == len(found)


def test_candidates_are_asked_in_the_order_of_a_plan():
    assert family_fingerprint.list_families("linear", "vector", 64) == ("vector_few", "vector_sm90", "vector")
    assert family_fingerprint.list_families("linear", "vector", 65) == ("vector_sm90", "vector")
    assert family_fingerprint.list_families("conv2d", "block", 8) == ("vector",)
    assert (
        family_fingerprint.list_families("conv2d", "nm", 8)
        == family_fingerprint.list_families("linear", "no such", 8)
        == ()
    )
    # Samples show every format that a family may run.
    assert set(family_fingerprint.SAMPLES) == set(variants.LINEAR) >= set(variants.CONV2D)
