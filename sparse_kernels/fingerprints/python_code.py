"""Eight digits that stand for Python code: that of some files, and what it uses of the rest of this package.

A file imports much that its kernels never run. So definitions count one by one: those of the files that were asked
for, then each function, class and constant that these name, and so on. A method counts where an attribute of its
name is read. Comments, docstrings, type hints, imports, line breaks and the file of a definition change nothing. The
digits are the same on every Python, which `ast.unparse` does not promise.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

DIGITS = 8
ROOT = Path(__file__).parents[1]
"""The folder of this package."""

_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
_MARKS = {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ";"}
_CLOSING = (")", "]", "}")

Place = tuple[int, int]
"""A line of a file, from 1, and a character in it, from 0."""

Name = tuple[str, str]
"""A module, and the name of a definition in it."""


@dataclass(frozen=True)
class Definition:
    """A function, a class, a constant, or another statement of a module.

    Attributes
    ----------
    text
        Its code without what changes nothing.
    uses
        The names of this package that it reads.
    attributes
        The names of all attributes that it reads.
    methods
        Those of a class, by name; they are no part of its text.
    constant
        Whether it is no function and no class.
    """

    text: str
    uses: frozenset[Name]
    attributes: frozenset[str]
    methods: Mapping[str, Definition] = field(default_factory=dict)
    constant: bool = False


@dataclass(frozen=True)
class ModuleCode:
    """The definitions of a module by name; `statements` have none. imports: names that stand for others."""

    definitions: dict[str, list[Definition]] = field(default_factory=dict)
    statements: list[Definition] = field(default_factory=list)
    imports: dict[str, Name] = field(default_factory=dict)


def fingerprint_code(modules: Sequence[str], *, alone: Sequence[str] = (), unrun: Collection[str] = ()) -> str:
    """Return the fingerprint of all that some modules define and use.

    Parameters
    ----------
    modules : sequence of str
        Modules of this package, such as ``sparse_kernels.cpu.kernels.token_blocks``.
    alone : sequence of str
        Further modules, of which only their own definitions count.
    unrun : collection of str
        Modules, and functions of modules, that a timed call does not run: of a module, constants alone count then.

    Returns
    -------
    str
        Eight hexadecimal digits.

    Raises
    ------
    FileNotFoundError
        There is no such module.
    """
    counted = [each for module in alone for each in _list_all(_read(module))]
    counted += [method for each in counted for method in each.methods.values()]
    texts = {each.text for each in [*counted, *_follow(modules, unrun)]}
    found = hashlib.sha256()
    for text in sorted(texts):
        found.update(text.encode() + b"\0")
    return found.hexdigest()[:DIGITS]


def _read(module: str) -> ModuleCode:
    return read_module(str(ROOT), module)


def _follow(modules: Sequence[str], unrun: Collection[str]) -> list[Definition]:
    """Return the definitions of the modules, and those that they use."""
    found: list[Definition] = []
    waiting = [each for module in modules for each in _list_all(_read(module))]
    seen, attributes = set[Name](), set[str]()
    unread: list[tuple[str, Definition]] = []  # methods of which nobody has read the name yet
    while waiting:
        each = waiting.pop()
        found.append(each)
        attributes |= each.attributes
        unread += each.methods.items()
        waiting += [method for name, method in unread if name in attributes or name.startswith("__")]
        unread = [(name, method) for name, method in unread if not (name in attributes or name.startswith("__"))]
        for used in each.uses - seen:
            seen.add(used)
            if ".".join(used) not in unrun:
                waiting += [one for one in _find(used) if one.constant or used[0] not in unrun]
    return found


def _list_all(code: ModuleCode) -> list[Definition]:
    return [*code.statements, *(each for own in code.definitions.values() for each in own)]


def _find(name: Name) -> list[Definition]:
    """Return what defines a name; [] for one of no module here, as those that a loop assigns."""
    module, wanted = name
    try:
        code = _read(module)
    except FileNotFoundError:
        return []
    if wanted in code.definitions:
        return code.definitions[wanted]
    return _find(code.imports[wanted]) if wanted in code.imports else []


@functools.cache
def read_module(root: str, module: str) -> ModuleCode:
    """Return the code of a module of the package in `root`. Raises FileNotFoundError."""
    path = Path(root, *module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    source = file.read_text(encoding="utf-8")
    tree, package = ast.parse(source), module.partition(".")[0]
    imports = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == package
        for alias in node.names
    }
    tokens = _select_tokens(source, tree)
    own = {name for node in tree.body for name in _list_defined(node)}

    def define(node: ast.stmt) -> Definition:
        methods = [each for each in node.body if _is_function(each)] if isinstance(node, ast.ClassDef) else []
        apart = {line for method in methods for line in _list_lines(method)}
        lines = [line for line in _list_lines(node) if line not in apart]
        text = " ".join(text for line in lines for text in tokens.get(line, []))
        walked = list(_walk_code(node, methods))
        if isinstance(node, ast.ClassDef) and any(_is_named(base, "NamedTuple") for base in node.bases):
            walked += [each for hint in _list_field_types(node) for each in ast.walk(hint)]
        return Definition(
            text,
            frozenset(_list_uses(walked, module, own, imports)),
            frozenset(each.attr for each in walked if isinstance(each, ast.Attribute)),
            {method.name: define(method) for method in methods},
            not (_is_function(node) or isinstance(node, ast.ClassDef)),
        )

    code = ModuleCode(imports=imports)
    for node in tree.body:
        if _is_silent(node):
            continue
        definition, names = define(node), _list_defined(node)
        for name in names:
            code.definitions.setdefault(name, []).append(definition)
        if not names:
            code.statements.append(definition)
    return code


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _list_field_types(node: ast.ClassDef) -> list[ast.expr]:
    """Return the types of a NamedTuple's fields: kernels take it apart, so that these are compiled code, too."""
    return [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


def _list_lines(node: ast.stmt) -> range:
    """Return the lines of a statement, with its decorators."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return range(first, (node.end_lineno or node.lineno) + 1)


def _is_silent(node: ast.stmt) -> bool:
    """Return whether a statement of a module runs nothing that matters: imports, docstrings, types for checkers."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _list_defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if _is_silent(node):
        return []
    found = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    for target in node.targets if isinstance(node, ast.Assign) else []:
        if isinstance(target, ast.Subscript | ast.Attribute) and isinstance(target.value, ast.Name):
            found.append(target.value.id)  # it changes what the name stands for
    made = [each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    return list(dict.fromkeys([*found, *made]))


def _list_uses(
    code: Iterable[ast.AST], module: str, own: Collection[str], imports: Mapping[str, Name]
) -> Iterator[Name]:
    """Yield the names of this package that some code reads."""
    for each in code:
        if isinstance(each, ast.Name):
            if each.id in own:
                yield module, each.id
            elif each.id in imports:
                yield imports[each.id]
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in imports:
            yield ".".join(imports[each.value.id]), each.attr  # of an imported module


def _walk_code(node: ast.AST, without: Collection[ast.AST]) -> Iterator[ast.AST]:
    """Yield a node and all below it, without type hints and without some nodes."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and each not in without:
                yield from _walk_code(each, without)


def _select_tokens(source: str, tree: ast.Module) -> dict[int, list[str]]:
    """Return the tokens that matter by line; blocks and ends of lines are marked."""
    lines = source.splitlines(keepends=True)
    hidden = sorted((*_find_span(node, lines), isinstance(node, ast.expr)) for node in _list_hidden(tree))
    found: list[tuple[int, str]] = []
    blocks: list[bool] = []  # of each open block, whether it is a class's: methods come and go without it
    header, wrapped = "", False  # the first token of this line of code; whether a line break was just skipped
    for token in _join_strings(tokenize.generate_tokens(io.StringIO(source).readline), lines):
        if token.type in _SILENT:
            wrapped = wrapped or token.type == tokenize.NL
            continue
        while hidden and hidden[0][1] <= token.start:
            hidden.pop(0)
        if hidden and hidden[0][0] <= token.start < hidden[0][1]:
            start, _, is_hint = hidden[0]
            if is_hint and token.start == start:
                found.pop()  # the sign before it
            continue
        last = found[-1][1] if found else _MARKS[tokenize.NEWLINE]
        if token.type == tokenize.NEWLINE and last in _MARKS.values():
            continue  # of a docstring
        if token.string in _CLOSING and last == "," and wrapped:
            found.pop()
        wrapped = False
        if token.type == tokenize.INDENT:
            blocks.append(header == "class")
            if blocks[-1]:
                continue
        if token.type == tokenize.DEDENT and blocks.pop():
            continue
        header = token.string if last in _MARKS.values() and token.type != tokenize.DEDENT else header
        # The end of a block stands before what comes next, and belongs to what came before.
        line = found[-1][0] if token.type == tokenize.DEDENT else token.start[0]
        found.append((line, _MARKS.get(token.type, token.string)))
    by_line: dict[int, list[str]] = {}
    for line, text in found:
        by_line.setdefault(line, []).append(text)
    return by_line


def _list_hidden(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Yield docstrings and type hints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _is_text(node):
            yield node
        for name in ("annotation", "returns"):
            if (hint := getattr(node, name, None)) is not None:
                yield hint


def _join_strings(tokens: Iterable[tokenize.TokenInfo], lines: Sequence[str]) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens, a string with fields as one, as it is before Python 3.12."""
    starts: list[tuple[int, int]] = []
    for token in tokens:
        name = tokenize.tok_name[token.type]
        if name in ("FSTRING_START", "TSTRING_START"):
            starts.append(token.start)
        elif name in ("FSTRING_END", "TSTRING_END"):
            start = starts.pop()
            if not starts:
                yield token._replace(type=tokenize.STRING, string=_cut(lines, start, token.end), start=start)
        elif not starts:
            yield token


def _find_span(node: ast.expr | ast.stmt, lines: Sequence[str]) -> tuple[Place, Place]:
    """Return where a node begins and ends, in characters; ast counts bytes."""
    assert node.end_lineno is not None and node.end_col_offset is not None

    def find(line: int, byte: int) -> Place:
        return line, len(lines[line - 1].encode()[:byte].decode())

    return find(node.lineno, node.col_offset), find(node.end_lineno, node.end_col_offset)


def _cut(lines: Sequence[str], start: Place, end: Place) -> str:
    """Return the source between two places."""
    some = list(lines[start[0] - 1 : end[0]])
    some[-1] = some[-1][: end[1]]
    some[0] = some[0][start[1] :]
    return "".join(some)
