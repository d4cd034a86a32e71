"""A packed file that is not as it was written is refused in a sentence, whatever is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exported_cases import ExportedFiles, build_image_layer, build_linear, export_layers

from sparse_kernels import Conv2dShape
from sparse_kernels.cpu.export.checksum import ROW_BYTES, compute_checksum
from sparse_kernels.cpu.export.cpu_levels import FEATURE_BITS, list_host_levels
from sparse_kernels.cpu.export.exported_library import BAD_ARGUMENT, BAD_FILE, ExportedLibrary, LibraryError
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.packed_weights import build_packed_file, seal

UNUSABLE = 3
FILES = 200

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ExportedFiles:
    """Two layers, exported for the least level."""
    return export_layers(tmp_path_factory.mktemp("packed"), some_layers(), list_host_levels()[:1])


def some_layers() -> list[ExportedLayer]:
    """A linear layer, and a convolution that keeps the padding of its images."""
    rng = np.random.default_rng(49)
    shape = Conv2dShape(1, 5, 9, 7, 24, 3, 3, padding=(1, 1))
    return [
        build_linear(rng, "linear", "vector:8", (24, 30)),
        build_image_layer(rng, "conv", "vector:8", shape),
    ]


def refuse(files: ExportedFiles, path: Path, level: str | None = None) -> LibraryError:
    """Return how the library refuses a file."""
    with pytest.raises(LibraryError) as caught:
        ExportedLibrary(files.library, path, level)
    return caught.value


def write_words(files: ExportedFiles, path: Path, words: dict[int, int], sealed: bool = True) -> Path:
    """Write the file with other words, and a checksum that fits them."""
    content = np.frombuffer(bytearray(files.packed.read_bytes()), np.uint64)
    for word, value in words.items():
        content[word] = value
    path.write_bytes(seal(content.tobytes()) if sealed else content.tobytes())
    return path


def test_two_files_of_the_same_layers_are_equal(files: ExportedFiles, tmp_path: Path) -> None:
    """With kernels from the cache, which `files` has filled: fresh code has other names."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        export_layers(folder, some_layers(), list_host_levels()[:1])
    assert (first / "layers.latbench").read_bytes() == (second / "layers.latbench").read_bytes()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, 4096, -ROW_BYTES, -1])
def test_a_truncated_file_is_refused(files: ExportedFiles, tmp_path: Path, size: int) -> None:
    path = tmp_path / "layers"
    path.write_bytes(files.packed.read_bytes()[:size])
    error = refuse(files, path)
    assert error.code == BAD_FILE
    assert str(path) in str(error)


def test_a_file_with_more_at_its_end_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    path = tmp_path / "layers"
    path.write_bytes(files.packed.read_bytes() + bytes(ROW_BYTES))
    assert "bytes and should have" in str(refuse(files, path))


def test_every_flipped_bit_of_200_files_is_refused(
    files: ExportedFiles, tmp_path: Path, rng: np.random.Generator
) -> None:
    content, path = files.packed.read_bytes(), tmp_path / "layers"
    for _ in range(FILES):
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        assert refuse(files, path).code == BAD_FILE


def test_files_with_a_right_checksum_and_wrong_tables_never_crash(
    files: ExportedFiles, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Only opened: what a forged file computes means nothing, but its tables must not lead outside of it.

    In a process of its own, whose end says whether something crashed.
    """
    content = np.frombuffer(files.packed.read_bytes(), np.uint64)
    used = np.flatnonzero(content)
    values = [0, 1, 7, 8, 2**16, 2**31, 2**32, 2**47 + 8, 2**63, 2**64 - 1, 2**64 - 8]
    for number in range(FILES):
        word = int(rng.choice(used[used > 3]))
        write_words(files, tmp_path / str(number), {word: values[rng.integers(len(values))]})
    code = """
import sys
from pathlib import Path
from sparse_kernels.cpu.export.exported_library import ExportedLibrary, LibraryError
refused = 0
for path in Path(sys.argv[2]).iterdir():
    try:
        ExportedLibrary(Path(sys.argv[1]), path).layers
    except LibraryError as error:
        assert str(error)
        refused += 1
print(refused)
"""
    command = [sys.executable, "-c", code, files.library, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_another_version_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    error = refuse(files, write_words(files, tmp_path / "layers", {1: 2}))
    assert (error.code, "version 2, this library reads 1" in str(error)) == (BAD_FILE, True)


def test_the_file_of_another_library_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    error = refuse(files, write_words(files, tmp_path / "layers", {4: 1}))
    assert (error.code, "the library is of another export" in str(error)) == (BAD_FILE, True)


def test_the_file_of_other_code_or_layers_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    """The kernels are the same; what calls them, or which layers they are of, is not."""
    source = tmp_path / "model.c"
    source.write_text("int one_model;\n")
    (level,) = files.levels
    renamed = replace(level, layers=[each.replace("linear", "stem") for each in level.layers])
    assert renamed.layers != level.layers
    for number, content in enumerate((build_packed_file([level], [source]), build_packed_file([renamed]))):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert "the library is of another export" in str(refuse(files, path))


def find_words(words: np.ndarray) -> tuple[int, list[int]]:
    """Return the words at which the section and the programs of all its layers begin."""
    section = int(words[13]) // 8
    layers, programs = section + int(words[section + 2]) // 8, []
    for layer in range(layers, layers + 16 * int(words[section + 1]), 16):
        first = section + int(words[layer + 13]) // 8
        programs += range(first, first + 10 * int(words[layer + 14]), 10)
    return section, programs


def test_a_text_without_an_end_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    """Lengths of which one more is 0, and one that leads out of the section."""
    words = np.frombuffer(files.packed.read_bytes(), np.uint64)
    section, programs = find_words(words)
    layer = section + int(words[section + 2]) // 8
    assert words[section:].tobytes()[int(words[layer]) :][: int(words[layer + 1])] == b"linear"
    for at in (layer + 1, programs[0] + 3):
        for length in (2**64 - 1, int(words[section + 4])):
            error = refuse(files, write_words(files, tmp_path / "layers", {at: length}))
            assert (error.code, "contradict each other" in str(error)) == (BAD_FILE, True)


def test_a_kept_buffer_of_two_programs_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    """Two programs may need more and less of it."""
    words = np.frombuffer(files.packed.read_bytes(), np.uint64)
    section, programs = find_words(words)
    kept = []
    for program in programs:
        buffers = section + int(words[program + 4]) // 8
        kept += [at + 1 for at in range(buffers, buffers + 4 * int(words[program + 5]), 4) if words[at + 1]]
    assert [int(words[at]) for at in kept] == [*range(1, int(words[section + 3]) + 1)] and len(kept) > 1
    error = refuse(files, write_words(files, tmp_path / "layers", {kept[1]: 1}))
    assert (error.code, "contradict each other" in str(error)) == (BAD_FILE, True)


def test_a_pipe_is_refused_and_not_waited_for(files: ExportedFiles, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refuse(files, tmp_path / "pipe").code == BAD_FILE


def test_other_levels_take_no_memory_once_the_file_is_checked(files: ExportedFiles, tmp_path: Path) -> None:
    """32 megabytes behind the only level stand for the others."""
    content = np.frombuffer(bytearray(files.packed.read_bytes() + bytes(32 << 20)), np.uint64)
    content[2] = content.nbytes
    path = tmp_path / "long"
    path.write_bytes(seal(content.tobytes()))
    library = ExportedLibrary(files.library, path)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    held = next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))
    assert held < 4096 and library.layers  # kilobytes; the system may map up to two megabytes at once


def test_a_level_that_the_machine_lacks_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    """A feature that no processor has stands for one that this processor lacks."""
    assert 40 not in FEATURE_BITS.values()
    path = write_words(files, tmp_path / "layers", {12: 1 << 40})
    error = refuse(files, path)
    assert (error.code, "lacks the CPU level x86-64-v3" in str(error)) == (UNUSABLE, True)
    assert refuse(files, path, "x86-64-v3").code == UNUSABLE


def test_a_level_that_was_not_exported_is_refused(files: ExportedFiles) -> None:
    error = refuse(files, files.packed, "x86-64-v9")
    assert (error.code, "was not exported for CPU level x86-64-v9" in str(error)) == (BAD_ARGUMENT, True)


def test_a_missing_file_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    assert "No such file" in str(refuse(files, tmp_path / "absent"))


def test_a_folder_is_refused(files: ExportedFiles, tmp_path: Path) -> None:
    assert refuse(files, tmp_path).code in (UNUSABLE, BAD_FILE)


def test_each_change_of_a_word_changes_the_checksum(rng: np.random.Generator) -> None:
    content = rng.integers(0, 256, 3 * ROW_BYTES, np.uint8)
    known = compute_checksum(content)
    for at in rng.integers(0, content.size, 50):
        changed = content.copy()
        changed[at] ^= 128
        assert compute_checksum(changed) != known
