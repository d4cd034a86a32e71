"""A visit to a machine with a GPU: all of its commands in their order, and a rehearsal of them without a GPU.

    python tests/gpu_visit.py compile           before the visit, without a GPU: cubins for it, into build/visit
    python tests/gpu_visit.py first  OUT        on the GPU: the smoke test, then the standard sweep
    python tests/gpu_visit.py keep   OUT        back home: what OUT holds becomes the table of its device
    python tests/gpu_visit.py second OUT        on the GPU again: the rest of the sweep, without tests
    python tests/gpu_visit.py keep   OUT
    python tests/gpu_visit.py report DEVICE     the table checked, and its report written

    python tests/gpu_visit.py rehearse FOLDER   all of it but `compile`, on a GPU that is not there, in FOLDER

Each command prints what it runs. The table goes where the next visit looks for it: datasets/measured/DEVICE.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "visit"
FIRST_SECONDS, SECOND_SECONDS = 560.0, 200.0
DEVICE = "nvidia-h200"  # of the rehearsal
LATBENCH = [sys.executable, "-P", "-m", "latbench.cli.main"]
SESSION = [sys.executable, "-P", "-m", "latbench.cli.gpu_session"]
FAKE_SESSION = [sys.executable, "-P", str(ROOT / "tests" / "latbench" / "fakes" / "fake_session.py")]


def run(*command: object) -> None:
    """Print and run a command; ends with its exit code unless that is 0, or 4: a later call goes on from there."""
    words = [str(word) for word in command]
    print("$", " ".join(words), flush=True)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "LATBENCH_CACHE": str(BUILD)}
    code = subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
    print(f"exit code {code}", flush=True)
    if code not in (0, 4):
        raise SystemExit(code)


def compile_cubins(architectures: Sequence[str]) -> None:
    """Compile every kernel for these architectures, so that no second of the visit goes into it."""
    chosen = [word for name in architectures for word in ("--architecture", name)]
    run(sys.executable, ROOT / "tests" / "sparse_kernels" / "cuda" / "gate.py", *chosen, "--folder", BUILD / "cubins")


def keep(out: Path, measured: Path) -> Path:
    """Add the table in `out` to the one of its device; return that one's folder. Rows that both have count once."""
    sys.path.insert(0, str(ROOT))
    from latbench.errors import LatbenchError
    from latbench.tables.table import read_table

    try:
        devices = set(read_table(out, ["device"])["device"])
    except LatbenchError as error:
        raise SystemExit(f"gpu_visit: {error}") from error
    if len(devices) != 1:
        raise SystemExit(f"gpu_visit: {out} has tables of {', '.join(sorted(devices)) or 'no device'}: one is kept")
    folder, fresh = measured / devices.pop(), measured / "being-merged"
    shutil.rmtree(fresh, ignore_errors=True)
    run(*LATBENCH, "merge", *([folder] if folder.is_dir() else []), out, "-o", fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder


def report(folder: Path, output: Path) -> None:
    """Check a table and write its report."""
    run(*LATBENCH, "validate", folder)
    run(*LATBENCH, "report", folder, "-o", output)


def rehearse(folder: Path, first_seconds: float, second_seconds: float, points: int) -> Path:
    """Go through a visit on a GPU that is not there; returns the table that it leaves."""
    measured = folder / "measured"
    measured.mkdir(parents=True, exist_ok=True)
    session = [*FAKE_SESSION, "--points", points]
    for number, seconds, tests in ((1, first_seconds, "smoke"), (2, second_seconds, "none")):
        out = folder / f"out-{number}"
        continued = ["--table", measured / DEVICE] if (measured / DEVICE).is_dir() else []
        run(*session, "--seconds", seconds, "--tests", tests, "--out", out, *continued)
        table = keep(out, measured)
    report(table, folder / "report.html")
    return table


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("compile", "first", "keep", "second", "report", "rehearse"))
    parser.add_argument("what", nargs="?", help="OUT, DEVICE or FOLDER, as above")
    parser.add_argument("--architecture", action="append", help="to compile for (default sm_90a)")
    parser.add_argument("--first-seconds", type=float, default=FIRST_SECONDS)
    parser.add_argument("--second-seconds", type=float, default=SECOND_SECONDS)
    parser.add_argument("--points", type=int, default=500, help="of the standard sweep, in a rehearsal (default 500)")
    given = parser.parse_args()
    if given.step == "compile":
        compile_cubins(given.architecture or ["sm_90a"])
        return
    if given.what is None:
        parser.error(f"{given.step} needs a folder, or a device: see --help")
    measured, out = ROOT / "datasets" / "measured", Path(given.what).resolve()
    match given.step:
        case "first":
            run(*SESSION, "--seconds", given.first_seconds, "--tests", "smoke", "--out", out)
        case "second":
            run(*SESSION, "--seconds", given.second_seconds, "--tests", "none", "--out", out)
        case "keep":
            print(keep(out, measured))
        case "report":
            report(measured / given.what, ROOT / "reports" / f"{given.what}.html")
        case "rehearse":
            table = rehearse(Path(given.what).resolve(), given.first_seconds, given.second_seconds, given.points)
            print(f"the table of the rehearsal: {table}")


if __name__ == "__main__":
    main()
