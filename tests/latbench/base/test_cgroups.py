"""What control groups leave a process, from made-up files of either version of them."""

from pathlib import Path

import psutil
import pytest

from latbench.base.cgroups import read_available_bytes
from latbench.sweeping.sweep_machine import CpuMachine

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        # The group above has the tighter limit; what is cached of files makes room.
        (
            {
                "proc/self/cgroup": "0::/box/inner\n",
                f"{V2}/box/memory.max": "1000\n", f"{V2}/box/memory.current": "700\n",
                f"{V2}/box/memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
                f"{V2}/box/inner/memory.max": "max\n", f"{V2}/box/inner/memory.current": "600\n",
            },
            450,
        ),
        # A container sees its own group as the top, though its path is the host's.
        (
            {
                "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
                f"{V2}/memory.max": "1000\n", f"{V2}/memory.current": "1200\n",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/other\n",
                f"{V1}/box/memory.limit_in_bytes": "1000\n", f"{V1}/box/memory.usage_in_bytes": "900\n",
                f"{V1}/box/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n", f"{V1}/memory.usage_in_bytes": "900\n",
            },
            130,
        ),
        ({"proc/self/cgroup": "0::/box\n", f"{V2}/box/memory.max": "max\n", f"{V2}/box/memory.current": "6\n"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_memory_that_is_left_is_that_of_the_tightest_group(
    tmp_path: Path, files: dict[str, str], left: float | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_available_bytes(tmp_path) == left


def test_a_block_of_points_fits_what_the_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = CpuMachine(1)
    monkeypatch.setattr("latbench.sweeping.sweep_machine.read_available_bytes", lambda: 4e6)
    assert machine.available_bytes() == 1e6
    monkeypatch.setattr("latbench.sweeping.sweep_machine.read_available_bytes", lambda: None)
    assert 0 < machine.available_bytes() <= psutil.virtual_memory().total / 4
