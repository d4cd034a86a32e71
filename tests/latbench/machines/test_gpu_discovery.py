"""Which GPUs a process may use, from an NVML that is a fake: drivers, MIG, CUDA_VISIBLE_DEVICES."""

import sys
from typing import Any

import gpu_fakes
import pytest

from latbench.errors import EnvironmentUnusable, UsageError
from latbench.machines import gpu_discovery
from latbench.machines.gpu_discovery import (
    ORDER_VARIABLE,
    VISIBLE_VARIABLE,
    Board,
    find_gpu,
    list_gpus,
    select_visible,
)
from latbench.machines.gpu_names import Gpu

A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H200, unless a test gives other devices; nothing hides it."""
    made = gpu_fakes.FakeNvml(gpu_fakes.H200)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    for name in (VISIBLE_VARIABLE, ORDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return made


def devices(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple({"name": name, "uuid": f"GPU-{number}a{number}b"} for number, name in enumerate(names))


# What is here ------------------------------------------------------------------------------------------------------


def test_the_gpu_that_is_there_is_found(fake: Any) -> None:
    assert list_gpus() == ([Gpu(H200, "GPU-3f2a1b2c-0000")], "")
    assert find_gpu("h200") == find_gpu("NVIDIA H200:0") == Gpu(H200, "GPU-3f2a1b2c-0000")
    assert fake.open == 0  # NVML is let go of again


def test_a_gpu_that_latbench_does_not_know_is_found_all_the_same(fake: Any) -> None:
    fake.devices = devices("NVIDIA Q900 128GB HBM5 SXM9")
    assert find_gpu("q900") == find_gpu("nvidia-q900-128gb-hbm5-sxm9") == Gpu(fake.devices[0]["name"], "GPU-0a0b")


def test_another_gpu_than_the_one_asked_for_is_refused_with_what_to_type(fake: Any) -> None:
    fake.devices = devices(H200, A100, A100)
    with pytest.raises(EnvironmentUnusable) as refused:
        find_gpu("t4")
    assert refused.value.exit_code == 3 and str(refused.value) == (
        "--gpu t4 requested, but this machine has NVIDIA H200, 2 x NVIDIA A100-SXM4-80GB: "
        "type --gpu h200 or --gpu a100, or measure the CPU with --cpu"
    )


def test_an_unknown_name_is_refused_with_what_to_type(fake: Any) -> None:
    with pytest.raises(UsageError) as refused:
        find_gpu("voodoo")
    assert str(refused.value) == "unknown GPU 'voodoo', this machine has NVIDIA H200: type --gpu h200"
    fake.devices = ()
    with pytest.raises(UsageError, match="unknown GPU 'voodoo'"):
        find_gpu("voodoo")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("LibraryNotFound", "no NVIDIA driver is installed .*: install one, or start the container with its GPUs"),
        ("DriverNotLoaded", "the NVIDIA driver is not loaded: sudo modprobe nvidia, or reboot"),
        ("LibRmVersionMismatch", r"the NVIDIA driver was updated .* \(driver/library version mismatch\): reboot"),
        ("NoPermission", "this user may not use the NVIDIA driver: check who may read and write /dev/nvidia"),
        ("Unknown", r"the NVIDIA driver fails \(Unknown\): nvidia-smi may tell more"),
    ],
)
def test_why_there_is_no_driver_is_said_with_what_to_do(fake: Any, reason: str, said: str) -> None:
    fake.driver = False
    fake.refusal = type(f"NVMLError_{reason}", (gpu_fakes.NVMLError,), {})(reason)
    with pytest.raises(EnvironmentUnusable, match=f"^--gpu a100 requested, but {said}") as refused:
        find_gpu("a100")
    assert refused.value.exit_code == 3 and "\n" not in str(refused.value)


def test_the_reasons_are_those_of_the_real_nvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in gpu_discovery._NO_DRIVER:
        error = getattr(pynvml, name)()
        assert isinstance(error, pynvml.NVMLError) and type(error).__name__ == name


def test_without_nvidia_ml_py_it_says_what_to_install(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnvironmentUnusable) as refused:
        find_gpu("a100")
    assert str(refused.value) == (
        "--gpu a100 requested, but nvidia-ml-py is not installed, so no GPU can be found: "
        "pip install 'latbench[cuda13]', or 'latbench[cuda12]' where the driver is older than 580"
    )


def test_a_driver_without_gpus_is_said(fake: Any) -> None:
    fake.devices = ()
    assert list_gpus() == ([], "the NVIDIA driver sees no GPU: nvidia-smi -L lists what it sees")


def test_a_divided_gpu_goes_by_its_slices(fake: Any) -> None:
    slices = [{"name": "NVIDIA H200 MIG 3g.71gb", "uuid": f"MIG-{i}", "instances": (i + 1, 0)} for i in range(2)]
    fake.devices = ({**gpu_fakes.H200, "slices": slices},)
    found, reason = list_gpus()
    assert [each.uuid for each in found] == ["MIG-0", "MIG-1"] and not reason
    assert find_gpu("h200-mig-3g.71gb:1") == found[1]
    with pytest.raises(EnvironmentUnusable, match=r"has 2 x NVIDIA H200 MIG 3g\.71gb: type --gpu h200-mig-3g-71gb"):
        find_gpu("h200")
    fake.devices = ({**gpu_fakes.H200, "slices": []},)
    assert list_gpus()[1].startswith("MIG is on and no GPU has an instance")


# CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------------------------------

FOUR = [Board(Gpu(A100, f"GPU-{uuid}")) for uuid in ("8932f937", "8932aaaa", "1111", "2222")]


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("3", [3]),
        ("2,1", [2, 1]),  # CUDA counts in this order
        (" 2 , 1 ", [2, 1]),
        ("0,2,-1,1", [0, 2]),  # NVIDIA's own example: an invalid entry hides all after it
        ("0,9,1", [0]),
        ("0,,1", [0]),
        ("0,one,1", [0]),
        ("GPU-8932f937", [0]),
        ("GPU-8932f", [0]),  # the beginning of one UUID alone
        ("GPU-8932", []),  # of two
        ("GPU-2222,GPU-8932,GPU-1111", [3]),
        ("GPU-2222,0", [3]),  # of another kind than the first
        ("1,GPU-2222", [1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # what Slurm sets for a job without a GPU
        ("4", []),
        ("0,0", []),
        ("GPU-1111,GPU-111", []),
        ("MIG-1", []),
    ],
)
def test_what_is_visible_is_what_cuda_shows(variable: str | None, shown: list[int]) -> None:
    found, reason = select_visible(FOUR, variable, None)
    assert found == [FOUR[number].gpu for number in shown]
    assert bool(reason) is not bool(shown)
    if not shown:
        assert reason.startswith(f"CUDA_VISIBLE_DEVICES={variable} ")


def test_slices_are_named_by_uuid_or_by_the_numbers_of_their_instances() -> None:
    parts = [Gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", f"MIG-{uuid}") for uuid in ("c788", "405b")]
    divided = {"MIG-c788": parts[0], "MIG-GPU-77/1/0": parts[0], "MIG-405b": parts[1], "MIG-GPU-77/2/0": parts[1]}
    boards = [Board(Gpu(A100, "GPU-77"), divided), Board(Gpu(A100, "GPU-99"))]
    for variable, shown in (
        (None, [*parts, boards[1].gpu]),
        ("MIG-405b", [parts[1]]),
        ("MIG-40", [parts[1]]),
        ("MIG-GPU-77/2/0", [parts[1]]),
        ("MIG-405b,MIG-c788", [parts[1], parts[0]]),
        ("MIG-GPU-77/2/0,MIG-405b", []),  # twice
        ("MIG-", []),
        ("0", parts),
        ("GPU-77", parts),
        ("1", [boards[1].gpu]),
    ):
        assert select_visible(boards, variable, None)[0] == shown, variable


def test_indices_are_ambiguous_among_different_gpus_unless_they_count_by_bus() -> None:
    mixed = [Board(Gpu(name, f"GPU-{number}")) for number, name in enumerate((A100, H200))]
    found, reason = select_visible(mixed, "1", None)
    assert not found and reason == (
        "CUDA_VISIBLE_DEVICES=1 is ambiguous here: CUDA counts GPUs from the fastest, nvidia-smi by PCI bus; "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID (nvidia-smi -L)"
    )
    assert not select_visible(mixed, "1", "FASTEST_FIRST")[0]
    assert select_visible(mixed, "1", "PCI_BUS_ID")[0] == select_visible(mixed, "GPU-1", None)[0] == [mixed[1].gpu]


def test_a_shared_server_gives_the_gpu_that_the_variable_names(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.devices = devices(A100, A100, A100, A100)
    monkeypatch.setenv(VISIBLE_VARIABLE, "3")
    assert find_gpu("a100").uuid == find_gpu("a100:0").uuid == "GPU-3a3b"
    with pytest.raises(UsageError, match="there is no GPU 3, CUDA_VISIBLE_DEVICES=3 shows NVIDIA A100"):
        find_gpu("a100:3")
    with pytest.raises(EnvironmentUnusable, match="h200 requested, but CUDA_VISIBLE_DEVICES=3 shows NVIDIA A100"):
        find_gpu("h200")
    monkeypatch.setenv(VISIBLE_VARIABLE, "")
    with pytest.raises(EnvironmentUnusable) as refused:
        find_gpu("a100")
    assert str(refused.value) == (
        "--gpu a100 requested, but CUDA_VISIBLE_DEVICES= hides every GPU of this machine "
        "(4 x NVIDIA A100-SXM4-80GB): unset it, or name one by index or UUID (nvidia-smi -L)"
    )
    monkeypatch.setenv(VISIBLE_VARIABLE, "1,1")
    with pytest.raises(EnvironmentUnusable, match="CUDA_VISIBLE_DEVICES=1,1 names a GPU twice"):
        find_gpu("a100")
