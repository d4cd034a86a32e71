"""Tables in object stores over HTTP, by the commands a user types: S3's (moto's), and where the emulators
gcp-storage-emulator (of PyPI) and azurite-blob (of npm's azurite) are on the PATH, Google's and Microsoft's.
"""

import base64
import hashlib
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from latbench.tables.table import has_table, hash_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START_SECONDS = 60
LATBENCH = Path(sys.executable).with_name("latbench")


@contextmanager
def serving(command: list[str], ready: Callable[[str], Request]) -> Iterator[str]:
    """The address of the store that `command`, with a port behind it, starts; once it answers `ready` of its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    server = subprocess.Popen(
        [*command, str(port)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                with urlopen(ready(f"http://{address}"), timeout=START_SECONDS):
                    break
            except URLError as error:
                if server.poll() is not None or isinstance(error, HTTPError) or time.monotonic() > end:
                    pytest.fail(f"no store of {command}: {error}")
                time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """The environment in which s3://bucket/... is a store of this machine with that one bucket, empty."""
    command = [sys.executable, "-m", "moto.server", "-p"]
    with serving(command, lambda address: Request(f"{address}/bucket", method="PUT")) as address:
        keys = {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything", "AWS_REGION": "us-east-1"}
        yield os.environ | keys | {"AWS_ENDPOINT_URL": f"http://{address}"}


# The account that azurite has from the start, whose key it publishes.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def shared_access() -> str:
    """A token that allows everything in the account (learn.microsoft.com, "Create an account SAS")."""
    fields = {
        "sp": "rwdlac", "ss": "b", "srt": "sco", "st": "2020-01-01T00:00:00Z", "se": "2099-01-01T00:00:00Z",
        "sip": "", "spr": "https,http", "sv": "2020-08-04",
    }  # fmt: skip
    signed = "".join(f"{text}\n" for text in (ACCOUNT, *fields.values()))
    signature = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    given = {name: text for name, text in fields.items() if text}
    return urlencode(given | {"sig": base64.b64encode(signature).decode()})


@pytest.fixture(params=["gs", "abfs"])
def emulated(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Gives the URI of a table by its name, in a store of this machine that is empty."""
    if request.param == "gs":
        if (emulator := shutil.which("gcp-storage-emulator")) is None:
            pytest.skip("no emulator of Google's store: pip install gcp-storage-emulator")
        command = [emulator, "start", "--host=127.0.0.1", "--in-memory", "--default-bucket=bucket", "--port"]
        with serving(command, lambda address: Request(f"{address}/storage/v1/b/bucket")) as address:
            endpoint = urlencode({"scheme": "http", "endpoint_override": address})
            yield lambda name: f"gs://anonymous@bucket/folder/{name}?{endpoint}"
    else:
        if (emulator := shutil.which("azurite-blob")) is None:
            pytest.skip("no emulator of Microsoft's store: npm install -g azurite")
        token = shared_access()

        def make(address: str) -> Request:
            container = f"{address}/{ACCOUNT}/bucket?restype=container&{token}"
            return Request(container, method="PUT", headers={"x-ms-version": "2020-08-04"})

        command = [emulator, "--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck"]
        with serving([*command, "--blobPort"], make) as address:
            yield lambda name: f"abfs://{ACCOUNT}@{address}/bucket/folder/{name}?enable_tls=false&{token}"


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
    assert compared.returncode == 0, compared
    counts = json.loads(compared.stdout)["counts"]  # on a restless machine little is known well enough
    assert sum(counts.values()) > 0 and counts["SAME"] + counts["UNCLEAR"] == sum(counts.values()), counts
    assert latbench(store, "report", table, "-o", tmp_path / "report.html").returncode == 0


def test_a_bucket_that_is_not_there_is_said_before_anything_is_measured(store: dict[str, str], tiny: Path) -> None:
    refused = latbench(store, *sweep_of(tiny, "s3://nobody/table"))
    assert refused.returncode == 3, refused
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("latbench: ")]
    assert line.startswith("latbench: cannot use s3://nobody/table") and "Traceback" not in refused.stderr


@pytest.mark.usefixtures("no_pace")
def test_the_stores_of_google_and_microsoft_hold_tables_too(
    emulated: Callable[[str], str], latbench: Any, tiny: Path, tmp_path: Path
) -> None:
    table = emulated("table")
    assert not has_table(table)
    sweep = sweep_of(tiny, table)
    assert latbench(*sweep).code == 0
    assert "14 were there already" in latbench(*sweep).out
    assert latbench("validate", table).code == 0
    assert latbench("merge", table, "-o", tmp_path / "copy").code == 0
    compared = latbench("compare", table, tmp_path / "copy", "--fail-on", "slower,missing", "--json")
    assert compared.code == 0 and json.loads(compared.out)["counts"]["SAME"] > 0
    assert latbench("report", table, "-o", tmp_path / "report.html").code == 0
    assert "sig=" not in (tmp_path / "report.html").read_text()

    both = emulated("both")
    assert latbench("merge", table, tmp_path / "copy", "-o", both).code == 0
    assert "exists already" in latbench("merge", table, "-o", both).refused(2)
    assert hash_table(both) == hash_table(table)
