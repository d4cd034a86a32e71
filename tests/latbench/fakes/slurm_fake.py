#!/usr/bin/env python3
"""Slurm's commands as far as a sweep needs them: a job is a process group of this machine, with locks and a cache of
its own. Whichever it is called as; it keeps its books in FAKE_SLURM, a folder. The cluster has one partition, gpu,
and A100s; a job of whose number there is a file hold-<number> stays in the queue.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(os.environ["FAKE_SLURM"])


def alive(job: Path) -> bool:
    try:
        state = Path(f"/proc/{(job / 'pid').read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def sbatch(file: str) -> None:
    text = Path(file).read_text()
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.M))
    if given.get("partition", "gpu") != "gpu":
        sys.exit(
            f"sbatch: error: invalid partition specified: {given['partition']}\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified"
        )
    if not given.get("gres", "gpu:a100:1").startswith("gpu:a100"):
        sys.exit("sbatch: error: Batch job submission failed: Requested node configuration is not available")
    number = len(list(HERE.glob("job-*"))) + 1
    job = HERE / f"job-{number}"
    job.mkdir()
    (job / "script").write_text(text)
    (job / "cache").mkdir()
    own = {"SLURM_JOB_ID": str(number), "XDG_CACHE_HOME": str(job / "cache"), "LATBENCH_LOCKS": str(job / "cache")}
    out, err = (given[name].replace("%j", str(number)).strip("'") for name in ("output", "error"))
    with Path(out).open("ab") as stdout, Path(err).open("ab") as stderr:
        started = subprocess.Popen(
            ["bash", "-c", f'while [ -e "{HERE}/hold-{number}" ]; do sleep 0.05; done; exec bash "{job}/script"'],
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env={**os.environ, **own}, start_new_session=True,
        )  # fmt: skip
    (job / "pid").write_text(str(started.pid))
    sys.stdout.write(f"Submitted batch job {number}\n")


def squeue(*_: str) -> None:
    for job in HERE.glob("job-*"):
        if alive(job):
            number = job.name[4:]
            sys.stdout.write(f"{number} {'Resources' if (HERE / f'hold-{number}').exists() else 'None'}\n")


def scancel(number: str) -> None:
    job = HERE / f"job-{number}"
    if alive(job):
        os.killpg(int((job / "pid").read_text()), signal.SIGTERM)


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel}
    commands[Path(sys.argv[0]).name](*sys.argv[1:])
