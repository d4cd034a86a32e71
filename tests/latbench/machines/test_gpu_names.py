"""Names of GPUs: what a user types, which of NVML's names that means, and what is said where it means none."""

import pytest

from latbench.errors import UsageError
from latbench.machines.gpu_names import (
    Gpu,
    WantedGpu,
    find_device_name,
    format_alternatives,
    format_option,
    matches_name,
    parse_wanted_gpu,
    select_gpu,
    shorten_name,
)

# Full names as NVML writes them; the device in tables; the short name; other ways to type it.
GPUS = [
    ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb", "a100", "A100", "a100-80gb", "A100_SXM4", "nvidia a100"),
    ("NVIDIA A100 80GB PCIe", "nvidia-a100-80gb-pcie", "a100", "a100-pcie", "tesla-a100"),
    ("NVIDIA H100 PCIe", "nvidia-h100-pcie", "h100", "h100-pcie"),
    ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3", "h100", "h100-80gb"),
    ("NVIDIA H100 NVL", "nvidia-h100-nvl", "h100", "H100 NVL"),
    ("NVIDIA H200", "nvidia-h200", "h200", "nvidia-h200"),
    ("NVIDIA H20", "nvidia-h20", "h20"),
    ("NVIDIA GH200 480GB", "nvidia-gh200-480gb", "gh200"),
    ("NVIDIA B200", "nvidia-b200", "b200"),
    ("NVIDIA GB200", "nvidia-gb200", "gb200"),
    ("NVIDIA B300 SXM6 AC", "nvidia-b300-sxm6-ac", "b300", "b300-sxm6"),
    ("NVIDIA GB10", "nvidia-gb10", "gb10"),
    ("Tesla T4", "nvidia-tesla-t4", "t4", "tesla-t4", "Tesla T4", "nvidia-t4"),
    ("Tesla V100-SXM2-16GB", "nvidia-tesla-v100-sxm2-16gb", "v100", "v100-16gb"),
    ("NVIDIA A10", "nvidia-a10", "a10"),
    ("NVIDIA A10G", "nvidia-a10g", "a10g"),
    ("NVIDIA A10-24Q", "nvidia-a10-24q", "a10-24q"),  # part of an A10, in a virtual machine
    ("NVIDIA L4", "nvidia-l4", "l4"),
    ("NVIDIA L40", "nvidia-l40", "l40"),
    ("NVIDIA L40S", "nvidia-l40s", "l40s", "L40S"),
    ("NVIDIA GeForce RTX 3080 Ti", "nvidia-geforce-rtx-3080-ti", "rtx-3080-ti", "rtx3080ti"),
    (
        "NVIDIA GeForce RTX 4090",
        "nvidia-geforce-rtx-4090",
        "rtx-4090",
        "rtx4090",
        "RTX 4090",
        "nvidia-rtx-4090",
        "4090",
    ),
    ("NVIDIA GeForce RTX 4090 D", "nvidia-geforce-rtx-4090-d", "rtx-4090-d", "rtx4090d", "nvidia-rtx-4090-d"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "nvidia-geforce-rtx-4090-laptop-gpu", "rtx-4090-laptop", "rtx4090laptop"),
    ("NVIDIA GeForce RTX 4080 SUPER", "nvidia-geforce-rtx-4080-super", "rtx-4080-super", "RTX 4080 Super"),
    ("NVIDIA RTX A6000", "nvidia-rtx-a6000", "rtx-a6000", "rtxa6000", "a6000"),
    ("NVIDIA RTX 6000 Ada Generation", "nvidia-rtx-6000-ada-generation", "rtx-6000-ada", "rtx6000ada"),
    ("Quadro RTX 6000", "nvidia-quadro-rtx-6000", "rtx-6000", "quadro-rtx-6000"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "nvidia-rtx-pro-6000-blackwell-server-edition",
        "rtx-pro-6000",
        "rtxpro6000",
        "rtx-pro-6000-blackwell",
    ),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia-a100-sxm4-40gb-mig-1g-5gb", "a100-mig-1g-5gb", "a100 MIG 1g.5gb"),
    ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", "nvidia-a100-sxm4-40gb-mig-1g-10gb", "a100-mig-1g-10gb"),
    ("NVIDIA Q900 128GB HBM5 SXM9", "nvidia-q900-128gb-hbm5-sxm9", "q900", "Q900 128GB"),  # made up
]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu[1])
def test_a_gpu_goes_by_its_short_and_by_its_full_name(gpu: tuple[str, ...]) -> None:
    full, device, *typed = gpu
    assert Gpu(full, "").device == device and shorten_name(full) == typed[0]
    for wanted in (full, device, device.removeprefix("nvidia-"), *typed, *(name.upper() for name in typed)):
        assert matches_name(full, wanted), wanted


def test_a_name_means_one_chip() -> None:
    # What differs only in memory, form factor or edition is one chip to a user, and different devices in tables.
    for full, _, name, *typed in GPUS:
        others = [other for other, _, its, *_ in GPUS if its != name]
        assert not [other for other in others for it in (name, *typed) if matches_name(other, it)], full


@pytest.mark.parametrize(
    ("full", "wanted"),
    [
        ("NVIDIA A10G", "a10"),
        ("NVIDIA A10", "a10g"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090d"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080"),
        ("NVIDIA L40S", "l40"),
        ("NVIDIA L40S", "l4"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA H200", "h20"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", "a100-mig-1g-5gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "80gb"),
        ("NVIDIA A100-SXM4-80GB", "nvidia"),
        ("NVIDIA A100-SXM4-80GB", ""),
        ("NVIDIA RTX A6000", "rtx"),
    ],
)
def test_another_chip_of_a_similar_name_is_another_gpu(full: str, wanted: str) -> None:
    assert not matches_name(full, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a100", WantedGpu("a100")), ("a100:2", WantedGpu("a100", 2)), (" RTX 4090:0 ", WantedGpu("RTX 4090", 0))],
)
def test_a_name_may_have_an_index(text: str, wanted: WantedGpu) -> None:
    assert parse_wanted_gpu(text) == wanted and str(wanted) == text.strip()


@pytest.mark.parametrize("text", ["", ":1", "a100:", "a100:x", "a100:-1", "a100:1:2", "nvidia", "nvidia:0", "???"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu takes NAME or NAME:INDEX, such as a100 or a100:2, not ") as refused:
        parse_wanted_gpu(text)
    assert refused.value.exit_code == 2


def gpus(*full: str) -> list[Gpu]:
    return [Gpu(name, f"GPU-{number}") for number, name in enumerate(full)]


SXM, PCIE, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA H200"


def test_a_name_alone_means_the_first_and_an_index_counts_all() -> None:
    here = gpus(H200, SXM, SXM)
    assert select_gpu(WantedGpu("a100"), here) == here[1]
    assert select_gpu(WantedGpu("a100", 2), here) == here[2]
    assert select_gpu(WantedGpu("h200", 0), here) == here[0]
    assert select_gpu(WantedGpu("t4"), here) is None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            WantedGpu("a100", 0),
            "--gpu a100:0: GPU 0 is NVIDIA H200, this machine has NVIDIA H200, 2 x NVIDIA A100-SXM4-80GB; "
            "type --gpu h200 for that one",
        ),
        (
            WantedGpu("a100", 3),
            "--gpu a100:3: there is no GPU 3, this machine has NVIDIA H200, 2 x NVIDIA A100-SXM4-80GB, counted from "
            "0; type --gpu h200 or --gpu a100",
        ),
    ],
)
def test_an_index_of_another_or_of_none_is_said_with_what_is_there(wanted: WantedGpu, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        select_gpu(wanted, gpus(H200, SXM, SXM))
    assert str(refused.value) == said


def test_a_name_of_different_models_is_refused_with_their_full_names() -> None:
    here = gpus(SXM, PCIE, SXM)
    with pytest.raises(UsageError) as refused:
        select_gpu(WantedGpu("a100"), here)
    assert str(refused.value) == (
        "--gpu a100 matches different models: type --gpu nvidia-a100-sxm4-80gb or --gpu nvidia-a100-80gb-pcie"
    )
    assert select_gpu(WantedGpu("nvidia-a100-80gb-pcie"), here) == select_gpu(WantedGpu("a100", 1), here) == here[1]
    beside = gpus("NVIDIA H200 NVL", H200)  # whose full name is the other's short one
    assert select_gpu(WantedGpu("nvidia-h200"), beside) == beside[1]


@pytest.mark.parametrize(
    ("full", "options"),
    [
        ([H200], ["h200"]),
        ([H200, SXM, SXM], ["h200", "a100:1", "a100:2"]),
        ([SXM, PCIE], ["a100:0", "a100:1"]),
        (["NVIDIA H200 NVL", H200], ["h200:0", "h200:1"]),
        (["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D"], ["rtx-4090", "rtx-4090-d"]),
    ],
)
def test_what_doctor_prints_means_that_gpu(full: list[str], options: list[str]) -> None:
    here = gpus(*full)
    assert [format_option(here, index) for index in range(len(here))] == options
    assert [select_gpu(parse_wanted_gpu(it), here) for it in options] == here


def test_every_alternative_can_be_typed() -> None:
    here = gpus(SXM, PCIE, H200, "NVIDIA H200 NVL", "NVIDIA L4")
    typed = format_alternatives(here).split(" or --gpu ")
    assert [select_gpu(WantedGpu(it), here) for it in typed] == here and typed[-1] == "l4"


@pytest.mark.parametrize(
    ("wanted", "device"),
    [
        ("A100", "nvidia-a100"),
        ("rtx4090", "nvidia-rtx-4090"),
        ("RTX 4090 D", "nvidia-rtx-4090-d"),
        ("gb10", "nvidia-gb10"),
        ("gb200", "nvidia-gb200"),
        ("b300", "nvidia-b300"),
        ("h20", "nvidia-h20"),
        ("a10g", "nvidia-a10g"),
        ("rtx6000ada", "nvidia-rtx-6000-ada"),
        ("a100-sxm4-80gb", "nvidia-a100-sxm4-80gb"),
        ("nvidia-q900-128gb", "nvidia-q900-128gb"),
        ("NVIDIA Q900", "nvidia-q900"),
    ],
)
def test_a_gpu_elsewhere_is_named_as_far_as_it_is_known(wanted: str, device: str) -> None:
    assert find_device_name(wanted) == device


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("x100", "unknown GPU 'x100', did you mean "),
        ("rtx4900", "did you mean rtx-4090"),
        ("voodoo", "unknown GPU 'voodoo': `latbench doctor` prints"),
        ("q900", "goes by its full name, such as nvidia-q900"),
    ],
)
def test_a_typo_is_refused_before_a_cluster_is_asked(wanted: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_device_name(wanted)
    assert hint in str(refused.value) and "\n" not in str(refused.value)
