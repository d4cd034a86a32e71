"""Where tables lie: folders, file:// and object stores, and what is said where one cannot be reached."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from latbench.base.bundled_data import list_bundled_tables
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from latbench.tables import storage
from latbench.tables.storage import parse_place
from latbench.tables.table import has_rows, has_table, hash_table, list_environments, list_parts, read_table
from latbench.tables.writer import write_environment, write_part

DENSE = {"pattern": "dense", "sparsity_target": 0.0, "backend": "torch"}


@pytest.fixture(params=["a folder of this machine", "a store in memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fs.FileSystem:
    """What s3://bucket/... reaches in this test: pyarrow's own stand-ins for an object store."""
    if request.param == "a store in memory":
        filesystem = fs._MockFileSystem()
    else:
        filesystem = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(storage, "_filesystem", lambda uri: (filesystem, uri.removeprefix("s3://")))
    return filesystem


def test_a_path_is_a_path() -> None:
    assert parse_place("folder/table") == Path("folder/table")
    assert parse_place(Path("/x")) == Path("/x")
    assert parse_place("odd:name") == Path("odd:name")


def test_a_file_uri_is_a_path_too(tmp_path: Path, row: dict[str, Any]) -> None:
    uri = f"file://{tmp_path}/table"
    part = write_part(uri, [row])
    assert isinstance(part, Path) and part.parent == tmp_path / "table"
    assert len(read_table(uri)) == len(read_table(tmp_path / "table")) == 1


def test_a_table_in_a_store_is_the_same_table(store: fs.FileSystem, tmp_path: Path, row: dict[str, Any]) -> None:
    uri = "s3://bucket/folder/table"
    assert not has_table(uri) and not has_rows(uri)
    with pytest.raises(BadData, match="s3://bucket/folder/table: no such table"):
        read_table(uri)
    environment = {"env_id": "a", "python": "3.11"}
    write_environment(uri, environment)
    assert has_table(uri) and not has_rows(uri)
    parts = [str(write_part(uri, [row | {"m": m}])) for m in (1, 2)]
    assert all(part.startswith("s3://bucket/folder/table/part-") for part in parts)
    assert [str(part) for part in list_parts(uri)] == sorted(parts) and has_rows(uri)
    assert sorted(read_table(uri)["m"]) == [1, 2] and len(read_table(parts[0])) == 1
    assert list_environments(uri) == list_environments(parts[1]) == [environment]
    for path in parts:
        content = store.open_input_file(path.removeprefix("s3://")).read()
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / Path(path).name).write_bytes(content)
    assert hash_table(uri) == hash_table(tmp_path / "copy")


def test_damage_in_a_store_is_named(store: fs.FileSystem, row: dict[str, Any]) -> None:
    part = str(write_part("s3://bucket/table", [row]))
    inside = part.removeprefix("s3://")
    content = store.open_input_file(inside).read()
    with store.open_output_stream(inside) as stream:
        stream.write(content[:-9])
    with pytest.raises(BadData, match=r"^s3://bucket/table/part-\w+\.parquet: damaged, truncated or edited"):
        read_table("s3://bucket/table")


def test_commands_take_uris(latbench: Any, store: fs.FileSystem, tmp_path: Path, row: dict[str, Any]) -> None:
    write_part("s3://bucket/a", [row | {"samples_seconds": [1e-3 + 1e-6 * i for i in range(9)]}])
    write_part(tmp_path / "b", [row | DENSE])
    assert latbench("merge", "s3://bucket/a", tmp_path / "b", "-o", "s3://bucket/both").code == 0
    assert "exists already" in latbench("merge", "s3://bucket/a", "-o", "s3://bucket/both").refused(2)
    assert "1 file: 1 note" in latbench("validate", "s3://bucket/both").out  # no environment is named
    ran = latbench("compare", "s3://bucket/a", "s3://bucket/both", "--fail-on", "slower,missing", "--json")
    assert ran.code == 0 and json.loads(ran.out)["counts"]["NEW"] == 1
    assert latbench("report", "s3://bucket/both", "-o", tmp_path / "report.html").code == 0
    assert "s3://bucket/both" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("no_pace")
def test_a_sweep_writes_to_a_store_and_goes_on_there(latbench: Any, store: fs.FileSystem, tiny: Path) -> None:
    arguments = ("sweep", "--cpu", "--workload", tiny, "--patterns", "dense", "--backends", "scipy,numba")
    arguments += ("--threads", "1", "-o", "s3://bucket/swept")
    assert latbench(*arguments).code == 0
    assert len(read_table("s3://bucket/swept")) >= 7 and len(list_environments("s3://bucket/swept")) == 1
    assert "7 were there already" in latbench(*arguments).out
    assert latbench("validate", "s3://bucket/swept").code == 0


@pytest.mark.parametrize("uri", ["nosuch://bucket/table", "s3://bucket/a b", "s3://"])
def test_a_uri_that_nobody_understands_is_a_wrong_request(latbench: Any, uri: str) -> None:
    assert f"latbench: {uri.partition('?')[0]}: " in latbench("validate", uri).refused(2)
    with pytest.raises(UsageError):
        parse_place(uri)


@pytest.mark.parametrize("uri", ["s3://me:hidden@bucket/a b", "abfs://me@bucket/table?odd=hidden"])
def test_what_is_secret_in_a_uri_is_not_printed(latbench: Any, uri: str) -> None:
    assert "hidden" not in latbench("validate", uri).refused(2)


@pytest.mark.usefixtures("store")
def test_what_is_secret_in_a_uri_is_in_no_report(
    latbench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: dict[str, Any]
) -> None:
    plain = storage._filesystem
    monkeypatch.setattr(storage, "_filesystem", lambda uri: plain(uri.partition("?")[0]))
    write_part("s3://bucket/a", [row, row | DENSE])
    assert latbench("report", "s3://bucket/a?secret_key=sesame", "-o", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text()
    assert "latbench report s3://bucket/a -o" in text and "sesame" not in text


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("s3://bucket/table", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/table", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfs://bucket/table", "a SAS token"),
    ],
)
def test_a_store_that_refuses_is_said_with_where_credentials_come_from(
    latbench: Any, monkeypatch: pytest.MonkeyPatch, uri: str, advice: str, row: dict[str, Any]
) -> None:
    class Refusing(fs.FileSystemHandler):  # type: ignore[misc]
        """A store that knows nobody."""

        def get_file_info(self, *_: Any) -> None:
            raise OSError("When getting information for key: AWS Error ACCESS_DENIED during HeadObject.\nmore")

        open_output_stream = get_file_info

    for name in Refusing.__abstractmethods__:
        setattr(Refusing, name, lambda self, *_: None)
    Refusing.__abstractmethods__ = frozenset()
    monkeypatch.setattr(storage, "_filesystem", lambda _: (fs.PyFileSystem(Refusing()), "bucket/table"))
    refused = latbench("validate", uri).refused(3)
    assert f"cannot use {uri}: " in refused and "ACCESS_DENIED during HeadObject" in refused and advice in refused
    with pytest.raises(EnvironmentUnusable, match="ACCESS_DENIED"):
        write_part(uri, [row])


def test_google_is_not_asked_for_a_quarter_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(storage, "_filesystem", lambda uri: (asked.append(uri), (fs._MockFileSystem(), "x"))[1])
    parse_place("gs://bucket/table")
    parse_place("gcs://bucket/table?anonymous=true")
    assert asked == [
        "gs://bucket/table?retry_limit_seconds=30", "gcs://bucket/table?anonymous=true&retry_limit_seconds=30",
    ]  # fmt: skip


def test_what_is_no_table_is_not_written_to_a_folder_called_s3(latbench: Any, tmp_path: Path, row: Any) -> None:
    write_part(tmp_path / "table", [row, row | DENSE])
    refused = latbench("report", tmp_path / "table", "-o", "s3://bucket/report.html").refused(2)
    assert "only tables go to a URI" in refused
    assert not Path("s3:").exists()


def test_a_bundled_table_is_read_by_its_name(latbench: Any) -> None:
    assert list_bundled_tables()
    for name in list_bundled_tables():
        assert has_rows(f"bundled://{name}") and latbench("validate", f"bundled://{name}").code == 0
    refused = latbench("validate", "bundled://nothing").refused(2)
    assert "bundled://nothing: no such table; there are " in refused and list_bundled_tables()[0] in refused
