"""Kernels become cubins, once; what cannot be compiled is said in one line."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import emulator
import pytest

from sparse_kernels.cuda import build
from sparse_kernels.cuda.program import Variant
from sparse_kernels.cuda.targets import TARGETS
from sparse_kernels.registry import MissingLibrary, NoDevice

KERNELS = Path(emulator.__file__).parent / "kernels"
GEMM = Variant(str(KERNELS / "gemm.cu"), "gemm", {"BF16": 0}, ("sm_80", "sm_90a"))
ELF = b"\x7fELF"

needs_13, needs_12 = (
    pytest.mark.skipif(build.load_nvrtc(major) is None, reason=f"needs {build.PACKAGES[major]}") for major in (13, 12)
)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of kernels of its own."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for path in (build.KERNELS / "primitives.cuh", KERNELS / "gemm.cu"):
        shutil.copy(path, folder)
    monkeypatch.setattr(build, "KERNELS", folder)
    return folder


@needs_13
def test_a_cubin_is_compiled_once(tmp_path):
    first = build.compile(GEMM, "sm_80", folder=tmp_path)
    written = first.path.stat().st_mtime_ns
    again = build.compile(GEMM, "sm_80", folder=tmp_path)
    assert first.path.read_bytes().startswith(ELF)
    assert again == first
    assert again.path.stat().st_mtime_ns == written


@needs_13
def test_the_compilers_log_is_read(tmp_path):
    cubin = build.compile(GEMM, "sm_80", folder=tmp_path)
    assert 32 < cubin.registers <= 255
    assert (cubin.stack_bytes, cubin.spilled_bytes) == (0, 0)


@needs_13
def test_settings_and_architectures_have_cubins_of_their_own(tmp_path):
    bf16 = Variant(GEMM.source, "gemm", {"BF16": 1}, GEMM.architectures)
    paths = {build.compile(one, arch, folder=tmp_path).path for one in (GEMM, bf16) for arch in GEMM.architectures}
    assert len(paths) == 4
    assert len({path.read_bytes() for path in paths}) == 4


@needs_13
@pytest.mark.parametrize("changed", ["gemm.cu", "primitives.cuh"])
def test_a_changed_source_or_header_is_compiled_anew(kernels, tmp_path, changed):
    one = Variant("gemm.cu", "gemm", {}, ("sm_80",))
    before = build.compile(one, "sm_80", folder=tmp_path).path
    path = kernels / changed
    path.write_text(path.read_text() + "\n// changed\n")
    assert build.compile(one, "sm_80", folder=tmp_path).path != before


@needs_13
def test_an_error_names_the_kernel_the_line_and_the_reason(kernels, tmp_path):
    (kernels / "broken.cu").write_text('extern "C" __global__ void broken() {\n  no_such_function();\n}\n')
    one = Variant("broken.cu", "broken", {}, ("sm_80",))
    with pytest.raises(build.BuildError) as caught:
        build.compile(one, "sm_80", folder=tmp_path)
    assert str(caught.value) == (
        'broken does not compile for sm_80: broken.cu(2): error: identifier "no_such_function" is undefined'
    )
    assert not list(tmp_path.glob("*.cubin"))


def test_an_architecture_that_a_kernel_is_not_for_is_refused(tmp_path):
    with pytest.raises(build.BuildError, match=r"gemm.bf160 is for sm_80, sm_90a, not sm_75"):
        build.compile(GEMM, "sm_75", folder=tmp_path)


def test_what_is_no_architecture_is_refused():
    with pytest.raises(build.BuildError, match=r"no kernel is compiled for 'ampere': known are sm_70, .*, sm_121"):
        build.find_nvrtc("ampere")


@pytest.mark.parametrize(
    ("architecture", "newest", "package"),
    [
        ("sm_70", 13, "nvidia-cuda-nvrtc-cu12>=12.8"),
        ("sm_80", 13, "nvidia-cuda-nvrtc>=13.0"),
        ("sm_80", 12, "nvidia-cuda-nvrtc-cu12>=12.8"),
        ("sm_110", 14, "nvidia-cuda-nvrtc>=13.0"),
        ("sm_120", 12, "nvidia-cuda-nvrtc-cu12>=12.8"),
        ("sm_121", 12, "nvidia-cuda-nvrtc-cu12>=12.9"),
    ],
)
def test_without_nvrtc_it_says_what_to_install(monkeypatch, architecture, newest, package):
    monkeypatch.setattr(build, "load_nvrtc", lambda major: None)
    with pytest.raises(MissingLibrary, match=rf"no NVRTC that compiles for {architecture}: pip install '{package}'$"):
        build.find_nvrtc(architecture, newest)


@pytest.mark.parametrize(("architecture", "newest", "needed"), [("sm_80", 11, 12), ("sm_110", 12, 13)])
def test_a_driver_that_is_too_old_is_named(architecture, newest, needed):
    with pytest.raises(NoDevice) as caught:
        build.find_nvrtc(architecture, newest)
    assert str(caught.value) == (
        f"the driver is for CUDA {newest}, and kernels for {architecture} need CUDA {needed} or newer: "
        "update the driver"
    )


def nvrtc_of(version, *architectures):
    return build.Nvrtc(None, f"libnvrtc.so.{version[0]}", version, architectures)


@pytest.mark.parametrize(
    ("runs", "known", "compiled"),
    [
        (("sm_121", "sm_120"), (100, 101, 120), "sm_120"),
        (("sm_121", "sm_120"), (100, 101, 103, 120, 121), "sm_121"),
        (("sm_103", "sm_100"), (100, 101, 120), "sm_100"),
        (("sm_89", "sm_86", "sm_80"), (80, 86, 89), "sm_89"),
    ],
)
def test_what_the_compiler_does_not_know_gives_way_to_older_code_that_runs_too(monkeypatch, runs, known, compiled):
    monkeypatch.setattr(build, "load_nvrtc", {12: nvrtc_of((12, 8), *known)}.get)
    assert build.select_compilable(runs, newest=12) == compiled


def test_where_nothing_can_be_compiled_the_gpus_own_architecture_is_named(monkeypatch):
    monkeypatch.setattr(build, "load_nvrtc", {12: nvrtc_of((12, 8), 80)}.get)
    reason = r"compiles for sm_121 \(libnvrtc.so.12 12.8 does not\): pip install 'nvidia-cuda-nvrtc-cu12>=12.9'$"
    with pytest.raises(MissingLibrary, match=reason):
        build.select_compilable(("sm_121", "sm_120"), newest=12)


@needs_12
def test_an_nvrtc_that_is_too_old_for_the_kernels_is_passed_over(monkeypatch):
    version = build.load_nvrtc(12).version
    monkeypatch.setattr(build, "OLDEST_NVRTC", {12: (version[0], version[1] + 1)})
    assert build.load_nvrtc.__wrapped__(12) is None


@pytest.mark.parametrize("major", [12, 13])
def test_an_nvrtc_of_the_version_that_is_asked_for_knows_the_architecture(major):
    """Of NVRTC as installed: the table says no later version than is true."""
    nvrtc = build.load_nvrtc(major)
    if nvrtc is None:
        pytest.skip(f"needs {build.PACKAGES[major]}")
    for name, target in TARGETS.items():
        assert nvrtc.supports(name) == (major in target.nvrtc and nvrtc.version >= target.nvrtc[major])


@needs_13
def test_an_nvrtc_that_is_too_new_for_the_machine_is_named(monkeypatch):
    newest = build.load_nvrtc(13)
    monkeypatch.setattr(build, "load_nvrtc", lambda major: newest if major == 13 else None)
    with pytest.raises(
        MissingLibrary, match=r"for sm_70 \(.*libnvrtc.so.13 13\.\d+ does not\): pip install '.*-cu12>=12.8'$"
    ):
        build.find_nvrtc("sm_70")


@needs_13
@needs_12
def test_volta_and_old_drivers_get_cuda_12():
    assert build.find_nvrtc("sm_80").version[0] == 13
    assert build.find_nvrtc("sm_70").version[0] == 12
    assert build.find_nvrtc("sm_80", newest=12).version[0] == 12


@needs_12
def test_cuda_12_compiles_for_volta(tmp_path):
    one = Variant(str(KERNELS / "plain.cu"), "plain", {}, ("sm_70",))
    assert build.compile(one, "sm_70", folder=tmp_path).path.read_bytes().startswith(ELF)


@needs_13
def test_processes_that_compile_the_same_at_once_leave_one_whole_cubin(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        cubins = list(pool.map(partial(build.compile, GEMM, folder=tmp_path), ["sm_80"] * 8))
    assert len({cubin.path for cubin in cubins}) == 1
    assert cubins[0].path.read_bytes() == build.compile(GEMM, "sm_80", folder=tmp_path / "alone").path.read_bytes()
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == [".cubin", ".log"]


def test_cubins_lie_in_latbenchs_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path))
    assert build.find_cubin_folder() == tmp_path / "cubins"
