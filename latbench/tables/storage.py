"""Places of tables: a folder of this machine, or an object store that pyarrow reaches by a URI.

`s3://bucket/table`, `gs://bucket/table`, `abfs://account@container/table`, `file:///folder/table` and any other URI
of `pyarrow.fs.FileSystem.from_uri`, with its options after a question mark; `bundled://NAME` is a table that comes
with latbench. Places of this machine are plain Paths and are written atomically. An object in a store appears when it
is complete, without a rename.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from latbench.base.bundled_data import SCHEME, find_bundled_table
from latbench.base.files import write_bytes_atomically
from latbench.errors import BadData, EnvironmentUnusable, UsageError

# The name of a part is the hash of its content, so that a reader detects any damage.
PART_NAME = re.compile(r"part-([0-9a-f]{16})\.parquet")

UNFINISHED = "unfinished.txt"  # lies beside the parts of a table until all are written

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://.*", re.S)

# Where each kind of store looks for credentials; for messages on refused requests.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or this machine's role; the region: s3://...?region=",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`; public: gs://anonymous@bucket",
    "abfs": "AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET, `az login`, or a SAS token after the ? of the "
    "URI, abfs://account@container/table?...",
}
_SAME_STORE = {"gcs": "gs", "abfss": "abfs"}
_GCS_PATIENCE_SECONDS = 30  # the client's default is 15 minutes of retries


@dataclass(frozen=True)
class RemotePlace:
    """A file or folder of a pyarrow filesystem, with the methods of a Path that tables need.

    Parameters
    ----------
    filesystem
        The filesystem.
    path
        Path within it.
    scheme
        Scheme of the URI, for messages.
    """

    filesystem: fs.FileSystem = field(repr=False, hash=False)  # filesystems can be compared but not hashed
    path: str
    scheme: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> RemotePlace:
        return replace(self, path=str(PurePosixPath(self.path) / name))

    def __lt__(self, other: RemotePlace) -> bool:
        return self.path < other.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> RemotePlace:
        """The folder that contains it."""
        return replace(self, path=str(PurePosixPath(self.path).parent))

    def is_file(self) -> bool:
        """Return whether there is such a file."""
        return bool(self._kind() == fs.FileType.File)

    def is_dir(self) -> bool:
        """Return whether there is such a folder, or anything under its name."""
        return bool(self._kind() == fs.FileType.Directory)

    def exists(self) -> bool:
        """Return whether there is a file or folder of this name."""
        return bool(self._kind() != fs.FileType.NotFound)

    def iterdir(self) -> Iterator[RemotePlace]:
        """Yield the files and folders in this folder."""
        with _reached(self):
            found = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return (replace(self, path=info.path) for info in found)

    def _kind(self) -> fs.FileType:
        with _reached(self):
            return self.filesystem.get_file_info(self.path).type


Place = Path | RemotePlace


def parse_place(where: str | Place) -> Place:
    """Return the place that a path or URI names. Raises UsageError for an unknown kind of URI."""
    if not isinstance(where, str):
        return where
    if (uri := _URI.fullmatch(where)) is None:
        return Path(where)
    named = hide_secrets(where)
    scheme = _SAME_STORE.get(uri[1].lower(), uri[1].lower())
    if scheme == SCHEME:
        return find_bundled_table(where.partition("://")[2])
    if scheme == "gs" and "retry_limit_seconds" not in where:
        where += f"{'&' if '?' in where else '?'}retry_limit_seconds={_GCS_PATIENCE_SECONDS}"
    try:
        filesystem, path = _filesystem(where)
    except (pa.ArrowException, OSError, ValueError) as error:
        said = _first_line(error).replace(where, named)
        raise UsageError(f"{named}: {said}; a table is a folder or at s3://, gs://, abfs:// or file://") from None
    if isinstance(filesystem, fs.LocalFileSystem):
        return Path(path)
    if not path:
        raise UsageError(f"{named}: names no folder; a folder is such as {scheme}://bucket/table")
    return RemotePlace(filesystem, path, scheme)


def hide_secrets(word: str) -> str:
    """Return a word of a command line without secrets: a URI without its password and options."""
    return re.sub(r"(://[^/:@]*):[^/@]*@", r"\1@", word.partition("?")[0]) if "://" in word else word


def _filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return pyarrow's filesystem for a URI, and the path within it."""
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    return found


def open_input(place: Place) -> pa.NativeFile:
    """Open a file for reading at any position. Raises BadData where there is none."""
    try:
        if isinstance(place, Path):
            return pa.OSFile(str(place))
        with _reached(place):
            return place.filesystem.open_input_file(place.path)
    except FileNotFoundError:
        raise BadData(f"{place}: no such file") from None
    except OSError as error:
        raise BadData(f"{place}: {error.strerror or _first_line(error)}") from error


def read_bytes(place: Place) -> bytes:
    """Return the content of a file that fits into memory. Raises BadData where there is none."""
    with open_input(place) as stream:
        content: bytes = stream.read()
    return content


def write_bytes(place: Place, content: Any) -> None:
    """Write `content` (bytes or a pyarrow buffer) to `place`, whole or not at all.

    Raises EnvironmentUnusable where the disk or the store refuses.
    """
    if isinstance(place, Path):
        write_bytes_atomically(place, content)
        return
    with _reached(place):
        # A store has no folders; other filesystems (and pyarrow's test doubles) need them created.
        if not isinstance(place.filesystem, fs.S3FileSystem | fs.GcsFileSystem | fs.AzureFileSystem):
            place.filesystem.create_dir(place.parent.path, recursive=True)
        with place.filesystem.open_output_stream(place.path) as stream:
            stream.write(content)


def remove_file(place: Place) -> None:
    """Remove a file. Raises EnvironmentUnusable where the disk or the store refuses."""
    if isinstance(place, Path):
        try:
            place.unlink()
        except OSError as error:
            raise EnvironmentUnusable(f"cannot remove {place}: {error.strerror or error}") from error
        return
    with _reached(place):
        place.filesystem.delete_file(place.path)


@contextmanager
def _reached(place: RemotePlace) -> Iterator[None]:
    """Turn errors of a store into a sentence; a missing file is left to the caller."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        known = _CREDENTIALS.get(place.scheme)
        advice = f"; its credentials come from {known}" if known else ""
        raise EnvironmentUnusable(f"cannot use {place}: {_first_line(error)}{advice}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
