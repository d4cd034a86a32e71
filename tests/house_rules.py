"""Count what makes the code hard to enter, and list each place: long functions, many arguments, repeated names.

    python tests/house_rules.py                  # the counts, a line each
    python tests/house_rules.py --show latbench  # every place of a package too
    python tests/house_rules.py --of REVISION    # the counts of another revision beside today's

`tests/test_architecture.py` fails for each place.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
MOST_LINES = 60
MOST_ARGUMENTS = 7
MOST_NESTING = 5
MOST_FILES = 16
MOST_WORDS = 25
COMMANDS = Path("latbench/cli/commands")
"""The options of a command are the arguments of its function, and a command may have the name of what it calls."""

RESULTS = Path("tests/experiments/results")
"""What trainings left: data, a file for each."""

REGISTRY = Path("latbench/base/engine_registry.py")
ENGINE_TABLES = ("CPU_ENGINES", "GPU_ENGINES", "MODEL_ENGINES")
LIBRARY_NAMES = {"torch", "onnxruntime", "openvino", "numba", "deepsparse", "scipy", "cupy", "cublas", "cusparse"}
"""Engines that are called as a library is: not every string with such a name is about the engine."""

OF_LIBRARIES = {"sys.modules", "environment", "facts"}
"""Mappings from the names of libraries to what is known of them."""

CODE = {".py", ".cpp", ".h", ".cu", ".cuh"}
FAMILIES = {"csr", "nm", "vector", "dense", "block"}
"""A pattern has one name in each room that knows it: its format, its CUDA kernels, its Numba kernels."""

BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match)

ESTIMATORS = {"Boosted"}
"""Estimators of scikit-learn: each of their settings is an argument of the constructor, by contract."""

Places = dict[str, list[str]]


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the four packages, its path relative to `root`."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root), ast.parse(path.read_text())


def nesting(node: ast.AST) -> int:
    """Return how many blocks lie in each other at most; an `elif` lies beside its `if`."""

    def depth(it: ast.AST, parent: ast.AST | None) -> int:
        if isinstance(it, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and parent is not None:
            return 0
        beside = isinstance(it, ast.If) and isinstance(parent, ast.If) and parent.orelse == [it]
        own = isinstance(it, BLOCKS) and not beside
        return own + max((depth(child, it) for child in ast.iter_child_nodes(it)), default=0)

    return depth(node, None)


def count_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of arguments, but for `self` and `cls`."""
    it = function.args
    every = [*it.posonlyargs, *it.args, *it.kwonlyargs]
    return len(every) - (bool(every) and every[0].arg in ("self", "cls"))


def emits_code(path: Path) -> bool:
    """Return whether a file holds emitters of vector code: their lines are those of the kernel that they write."""
    kernels = Path("sparse_kernels/cpu")
    return path.parent == kernels / "codegen" or path in {
        kernels / "matrix_unit" / f"{kind}_tiles.py" for kind in ("third", "byte")
    }


def find_places(root: Path) -> Places:
    """Return for each rule the places that break it."""
    found: Places = {rule: [] for rule in RULES}
    stems: defaultdict[str, list[str]] = defaultdict(list)
    classes: defaultdict[str, list[str]] = defaultdict(list)
    trees = dict(modules(root))
    found["names imported second-hand"] = find_second_hand(trees)
    found["function names in three rooms"] = find_repeated_names(trees)
    found["engine names outside the registry"] = find_engine_names(trees, read_engine_names(root))
    found["kernel functions without a verb"] = find_verbless(trees, read_verbs())
    for path, tree in trees.items():
        for rule, place in check_docstrings(tree, path):
            found[rule].append(place)
        if path.name not in ("__init__.py", "__main__.py") and path.parent != COMMANDS and path.stem not in FAMILIES:
            stems[path.stem].append(str(path))
        exempt: list[ast.stmt] = []
        for node in ast.walk(tree):
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(place)
                exempt += node.body if node.name in ESTIMATORS else []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES and not emits_code(path):
                    found["functions over 60 lines"].append(f"{place} {node.name}: {lines}")
                if count_arguments(node) > MOST_ARGUMENTS and path.parent != COMMANDS and node not in exempt:
                    found["functions over 7 arguments"].append(f"{place} {node.name}: {count_arguments(node)}")
                if nesting(node) > MOST_NESTING:
                    found["blocks nested over 5"].append(f"{place} {node.name}: {nesting(node)}")
            if "numba_internals.py" not in path.name:
                found["private Numba outside its module"] += private_numba(node, place)
    found["file names twice"] = [f"{stem}: {', '.join(them)}" for stem, them in stems.items() if len(them) > 1]
    found["class names twice"] = [f"{name}: {', '.join(them)}" for name, them in classes.items() if len(them) > 1]
    for folder in find_folders(root):
        count = count_files(root / folder)
        if count > MOST_FILES and folder != COMMANDS:
            found["folders over 16 files"].append(f"{folder}: {count}")
    return found


def find_folders(root: Path) -> list[Path]:
    """Return every folder of the four packages and of the tests that holds code, relative to `root`."""
    inside = (path for top in (*PACKAGES, "tests") for path in (root / top).rglob("*.*") if path.suffix in CODE)
    folders = {path.parent.relative_to(root) for path in inside}
    return sorted(folder for folder in folders if not folder.is_relative_to(RESULTS))


def count_files(folder: Path) -> int:
    """Return the number of files right in a folder, but for those that every package has."""
    return sum(path.is_file() and path.name not in ("__init__.py", "py.typed") for path in folder.iterdir())


def private_numba(node: ast.AST, place: str) -> list[str]:
    """Return the place if the node imports what Numba calls private, or touches a dispatcher's cache."""
    names: Sequence[str] = ()
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module]
    elif isinstance(node, ast.Import):
        names = [it.name for it in node.names]
    private = [it for it in names if it.startswith(("numba.core", "numba.np", "numba.parfors"))]
    if isinstance(node, ast.Attribute) and node.attr in ("_cache", "_compiler", "_make_finalizer"):
        private.append(node.attr)
    return [f"{place} {it}" for it in private]


def read_engine_names(root: Path) -> frozenset[str]:
    """Return the names of all engines in the registry; none where a revision has no registry."""
    path = root / REGISTRY
    registry = runpy.run_path(str(path)) if path.exists() else {}
    return frozenset(name for table in ENGINE_TABLES for name in registry.get(table, ()))


def find_engine_names(trees: Mapping[Path, ast.Module], names: frozenset[str]) -> list[str]:
    """Return the places outside the registry that decide by an engine's name.

    A name that no library has counts anywhere. `sparse_kernels` lies below the registry.
    """
    found = []
    for path, tree in trees.items():
        if path == REGISTRY or path.parts[0] == "sparse_kernels":
            continue
        for node in ast.walk(tree):
            own = [node.value] if isinstance(node, ast.Constant) and node.value in names - LIBRARY_NAMES else []
            if decided := [str(it) for it in [*own, *list_deciding_constants(node, names)] if it in names]:
                found.append(f"{path}:{getattr(node, 'lineno', 0)} {', '.join(decided)}")
    return found


def list_deciding_constants(node: ast.AST, names: frozenset[str]) -> list[object]:
    """Return the constants that a node compares with or looks up, and collections of nothing but `names`."""
    parts: Sequence[ast.AST | None] = ()
    match node:
        case ast.Compare() if OF_LIBRARIES.isdisjoint(map(ast.unparse, node.comparators)):
            parts = [node.left, *node.comparators]
            parts = [*parts, *(inner for it in parts for inner in getattr(it, "elts", ()))]
        case ast.Subscript() if ast.unparse(node.value) not in OF_LIBRARIES:
            parts = [node.slice]
        case ast.Call(func=ast.Attribute(value=mapping, attr="get")) if ast.unparse(mapping) not in OF_LIBRARIES:
            parts = node.args[:1]
        case ast.MatchValue():
            parts = [node.value]
        case ast.Dict(keys=every) | ast.Tuple(elts=every) | ast.List(elts=every) | ast.Set(elts=every):
            values = [getattr(it, "value", None) for it in every]
            parts = every if len(values) > 1 and names.issuperset(values) else ()
    return [it.value for it in parts if isinstance(it, ast.Constant)]


def check_docstrings(tree: ast.Module, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the rule and the place of each docstring that is not plain English."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        name = getattr(node, "name", "module")
        place = f"{path}:{getattr(node, 'lineno', 1)} {name}"
        first = re.match(r"\W*(\w+)", text)
        verbless = first is not None and first[1].lower() in NO_VERBS
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and needs_verb(node) and verbless:
            yield "function docstrings without a verb", f"{place}: {text.splitlines()[0]}"
        for sentence in sentences(text):
            if len(sentence.split()) > MOST_WORDS:
                yield "docstring sentences over 25 words", f"{place}: {sentence}"


def needs_verb(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a docstring must begin with a verb: properties and dunder methods name what they are."""
    decorators = [ast.unparse(it) for it in function.decorator_list]
    return not any("property" in it for it in decorators) and not function.name.startswith("__")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring's paragraphs, without its lists, examples and sections."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.search(r"^\s{4,}|^-+$|^\s*(\d|- )|^>>>", paragraph, re.MULTILINE):
            yield from re.split(r"(?<=[.!?:])\s+", paragraph)


def find_second_hand(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return each import of a name from a module that only imports it itself; packages may offer names of theirs."""
    imported: dict[str, set[str]] = {}
    for path, tree in trees.items():
        if path.name != "__init__.py":
            names = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", ())}
            imported[".".join(path.with_suffix("").parts)] = {str(name) for name in names if isinstance(name, str)}
    return [
        f"{path}:{node.lineno} {alias.name} from {node.module}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in imported
        for alias in node.names
        if alias.name in imported[str(node.module)]
    ]


def find_repeated_names(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return the names that public functions of three rooms or more share: one verb has one meaning."""
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body if path.parent != COMMANDS else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in SAME_MEANING:
                rooms[node.name].add("/".join(path.parts[:2]) if len(path.parts) > 2 else str(path))
    return [f"{name}: {', '.join(sorted(them))}" for name, them in rooms.items() if len(them) > 2]


def read_verbs() -> frozenset[str]:
    """Return the verbs of the table in CONTRIBUTING.md, and those of few functions."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    rows = (line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    return OTHER_VERBS.union(*(re.findall(r"`([a-z]+)", row) for row in rows))


def find_verbless(trees: Mapping[Path, ast.Module], verbs: frozenset[str]) -> list[str]:
    """Return the public functions of the kernels whose names begin with none of these verbs."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and path.is_relative_to("sparse_kernels")
        and path.parts[1] in KERNEL_ROOMS
        if not (node.name.startswith("_") or node.name.split("_")[0] in verbs or needs_no_verb(node))
    ]


def needs_no_verb(function: ast.FunctionDef) -> bool:
    """Return whether a function's name may be no verb."""
    asks = function.returns is not None and ast.unparse(function.returns) == "bool"
    emits = any(ast.unparse(it).startswith("vector_code") for it in function.decorator_list)
    return asks or emits or function.name in NAMED_OTHERWISE


KERNEL_ROOMS = ("cpu", "cuda", "formats")
"""Folders whose public functions begin with a verb.

Left out: `numba_cuda`, where a new name would make measured times of a kernel obsolete. Modules above the folders
hold what users call and what torch names (`matmul`, `attention`).
"""

OTHER_VERBS = frozenset({
    "advance", "allocate", "attach", "attend", "borrow", "cache", "call", "compute", "configure", "cut", "describe",
    "emit", "fetch", "fill", "fingerprint", "freeze", "give", "inline", "link", "locate", "order", "plan", "pool",
    "quantize", "record", "restore", "round", "seal", "serialize", "set", "start", "swizzle", "take", "view", "walk",
    "watch", "widen",
})  # fmt: skip
"""Verbs of one function or two, which mean what they mean everywhere. The table in CONTRIBUTING.md has the others."""

NAMED_OTHERWISE = {
    "attention",  # an operation, which papers and torch call so
    "vector_code", "with_literals",  # decorators: each says what the function under it is
}  # fmt: skip
"""Functions without a verb, and why. A question (it returns a bool) and an emitter (by what it emits) need none."""

SAME_MEANING = {"main", "prepare", "prepare_conv2d", "pack", "unpack"}
"""Names with one meaning in every room: a script's entry; weights made ready for an engine; the packed format."""

NO_VERBS = frozenset({
    "a", "all", "an", "any", "as", "at", "both", "by", "each", "every", "for", "from", "how", "if", "in", "it", "its",
    "no", "none", "not", "nothing", "of", "on", "one", "only", "same", "so", "some", "such", "that", "the", "their",
    "these", "this", "those", "to", "true", "what", "when", "where", "whether", "which", "who", "with",
})  # fmt: skip
"""Words with which no sentence in the imperative begins."""

RULES = (
    "functions over 60 lines", "functions over 7 arguments", "blocks nested over 5", "file names twice",
    "class names twice", "folders over 16 files", "private Numba outside its module", "names imported second-hand",
    "function names in three rooms", "engine names outside the registry", "function docstrings without a verb",
    "docstring sentences over 25 words", "kernel functions without a verb",
)  # fmt: skip


def at_revision(revision: str, folder: Path) -> Path:
    """Unpack a revision of this project into `folder`, and return it."""
    root = Path(__file__).parents[1]
    packed = subprocess.run(["git", "archive", revision], cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description="Count what makes the code hard to enter.")
    parser.add_argument("--show", metavar="PATH", help="list the places whose text starts with or contains PATH")
    parser.add_argument("--of", metavar="REVISION", help="another revision, beside today's")
    given = parser.parse_args()
    today = find_places(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        before = find_places(at_revision(given.of, Path(folder))) if given.of else {}
    for rule, places in today.items():
        print(f"{rule:36}" + (f"{len(before[rule]):5} ->" if before else "") + f"{len(places):5}")
        for place in places if given.show else []:
            if given.show in place:
                print(f"    {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
