"""A table in an object store that speaks S3 over HTTP (moto's), by the commands a user types."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START_SECONDS = 60
LATBENCH = Path(sys.executable).with_name("latbench")


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """The environment in which s3://bucket/... is a store of this machine with that one bucket, empty."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        answer(server, Request(f"{address}/bucket", method="PUT"))
        keys = {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_REGION": "us-east-1"}
        yield os.environ | keys | {"AWS_ENDPOINT_URL": address}
    finally:
        server.kill()
        server.wait()


def answer(server: "subprocess.Popen[bytes]", request: Request) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with urlopen(request, timeout=START_SECONDS):
                return
        except URLError:
            if server.poll() is not None or time.monotonic() > end:
                pytest.fail("no store: pip install 'moto[s3,server]'")
            time.sleep(0.1)


def latbench(store: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(LATBENCH), *(str(argument) for argument in arguments)]
    return subprocess.run(command, env=store, capture_output=True, text=True)


def sweep_of(workload: Path, table: str) -> tuple[str | Path, ...]:
    return (
        "sweep", "--cpu", "--workload", workload, "--patterns", "dense,vector:8", "--sparsities", "0.5",
        "--backends", "scipy,numba", "--threads", "1", "-o", table,
    )  # fmt: skip


def test_an_interrupted_sweep_goes_on_in_the_store_and_its_table_serves_every_command(
    store: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    table = "s3://bucket/folder/table"
    sweep = sweep_of(tiny, table)
    running = subprocess.Popen(
        [str(LATBENCH), *map(str, sweep)], env=store, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while running.poll() is None and latbench(store, "validate", table).returncode != 0:
        pass  # nothing is there yet
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=120)
    assert "Traceback" not in error, error
    again = latbench(store, *sweep)
    assert again.returncode == 0 and "were there already" in again.stdout, again
    assert "14 were there already" in latbench(store, *sweep).stdout

    assert latbench(store, "validate", table).returncode == 0
    assert latbench(store, "merge", table, "-o", tmp_path / "copy").returncode == 0
    compared = latbench(store, "compare", table, tmp_path / "copy", "--fail-on", "slower,missing", "--json")
    assert compared.returncode == 0 and json.loads(compared.stdout)["counts"]["SAME"] > 0, compared
    assert latbench(store, "report", table, "-o", tmp_path / "report.html").returncode == 0


def test_a_bucket_that_is_not_there_is_said_before_anything_is_measured(store: dict[str, str], tiny: Path) -> None:
    refused = latbench(store, *sweep_of(tiny, "s3://nobody/table"))
    assert refused.returncode == 3, refused
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("latbench: ")]
    assert line.startswith("latbench: cannot use s3://nobody/table") and "Traceback" not in refused.stderr
