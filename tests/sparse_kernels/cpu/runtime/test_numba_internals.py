"""What the CPU kernels rely on beyond Numba's public interface: each test names what broke when a new Numba comes.

Until all pass, keep the upper bound of numba in pyproject.toml, and mend
`sparse_kernels.cpu.runtime.numba_internals`.
"""

import pickle
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.runtime import numba_internals

FIELDS = 3


class Pair(NamedTuple):
    first: int
    second: int


def released(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def test_the_installed_numba_is_one_that_pyproject_allows() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    for name in ("numba", "llvmlite"):
        [range_] = [each for each in project["dependencies"] if each.startswith(f"{name}>")]
        least, below = range_.removeprefix(f"{name}>=").split(",<")
        assert released(least) <= released(version(name)) < released(below), f"{name} was not tested in this version"


def test_the_compile_target_is_a_triple_a_processor_and_features() -> None:
    triple, cpu, features = numba_internals.read_compile_target()
    assert triple and cpu, "numba.core.registry.cpu_target no longer says what code is generated for"
    assert all(feature and feature[0] not in "+-" for feature in features), "features are no longer written as +name"


def test_llvm_helpers_have_the_functions_that_emitters_call() -> None:
    needed = (
        "alloca_once", "for_range_slice", "gep_inbounds", "get_null_value", "get_or_insert_function", "unpack_tuple",
    )  # fmt: skip
    missing = [name for name in needed if not hasattr(numba_internals.cgutils, name)]
    assert not missing, f"numba.core.cgutils has lost {missing}"


def test_a_function_loads_from_and_saves_to_a_cache_of_ours() -> None:
    saved: dict[object, object] = {}

    class Files:
        def load(self, key: object) -> object:
            return saved.get(key)

        def save(self, key: object, data: object) -> None:
            saved[key] = pickle.loads(numba_internals.serialize(data))

    def double(x):  # type: ignore[no-untyped-def]
        return 2 * x

    def compiled(function):  # type: ignore[no-untyped-def]
        cache = numba_internals.FunctionCache(function)
        assert cache._impl.filename_base and cache._cache_path, (
            "FunctionCache no longer says where and as what it saves"
        )
        cache._cache_file = Files()
        dispatcher = njit(function)
        numba_internals.attach_cache(dispatcher, cache)
        return dispatcher

    assert compiled(double)(4) == 8
    assert len(saved) == 1, "a dispatcher no longer saves to what is attached as its cache"
    [key] = saved
    assert "int64" in str(key[0]), "a key of the cache no longer begins with the signature"  # type: ignore[index]
    again = compiled(double)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1, (
        "a dispatcher no longer loads from what is attached as its cache"
    )


def test_a_cache_s_files_lie_in_a_folder_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x):  # type: ignore[no-untyped-def]
        return 2 * x

    def find_path() -> str:
        own = numba_internals.build_cache_implementation(lambda: tmp_path / "own")
        cache = type("Cache", (numba_internals.FunctionCache,), {"_impl_class": own})(double)
        assert cache._impl.locator.get_source_stamp(), "a locator no longer says which source a function is from"
        return str(cache._cache_path)

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert find_path() == str(tmp_path / "own"), "a cache no longer asks its locator for a folder"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "given"))
    assert find_path().startswith(str(tmp_path / "given")), "NUMBA_CACHE_DIR no longer decides where files lie"


def test_a_function_without_counts_calls_no_counter_of_references() -> None:
    def first_of_longer(x, y):  # type: ignore[no-untyped-def]
        longer = x if x.size > y.size else y
        return longer[0]

    def count_calls(**options: object) -> int:
        dispatcher = njit(**options)(first_of_longer)
        assert dispatcher(np.arange(3.0), np.arange(1.0, 5.0)) == 1
        code = dispatcher.inspect_llvm(dispatcher.signatures[0])
        function = code[code.index("define noundef i32 @") :]
        return function[: function.index("\n}")].count("@NRT_incref")

    assert count_calls() > 0, "Numba no longer counts references here: the comparison has lost its sense"
    assert count_calls(**numba_internals.WITHOUT_COUNTS) == 0, "the option _nrt no longer leaves the counting out"


def test_a_function_without_a_wrapper_is_called_by_compiled_code_alone() -> None:
    def twice(x):  # type: ignore[no-untyped-def]
        return 2 * x

    def defined(**options: object) -> str:
        inner = njit(**options)(twice)
        assert njit(lambda x: inner(x) + 1)(3) == 7
        return "".join(line for line in inner.inspect_llvm(inner.signatures[0]).splitlines() if "define" in line)

    assert "@_ZN7cpython" in defined(), "Numba's wrappers have other names: the comparison has lost its sense"
    without = defined(**numba_internals.WITHOUT_WRAPPER)
    assert "@_ZN7cpython" not in without, "the option no_cpython_wrapper no longer leaves the wrapper out"
    assert "@cfunc" in without and "@cfunc" not in defined(no_cfunc_wrapper=True), "nor no_cfunc_wrapper"


def test_the_quick_count_of_threads_is_the_slow_one() -> None:
    before = numba.get_num_threads()  # starts them
    count = numba_internals.find_thread_counter()
    assert count is not numba.get_num_threads, "numba.np.ufunc.parallel has no _get_num_threads: calls take longer"
    try:
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            assert count() == threads, "_get_num_threads no longer counts the threads of the caller"
    finally:
        numba.set_num_threads(before)


def test_numbas_openmp_library_is_a_file() -> None:
    numba.get_num_threads()
    if numba.config.THREADING_LAYER not in ("default", "omp"):
        return
    try:
        path = numba_internals.find_openmp_library()
    except ImportError:
        return  # built without OpenMP
    assert Path(path).is_file(), "numba.np.ufunc.omppool is no longer a library with a path"


@vector_code(Pair)
def store_sum(builder: ir.IRBuilder, form: Pair, address: ir.Value, given: Pair) -> None:
    """Write form.first + form.second + given.first - given.second at an address."""
    assert isinstance(form.first, int), "a tuple that a kernel encloses is no longer made of literals"
    total = builder.add(ir.Constant(ir.IntType(64), form.first + form.second), builder.sub(given.first, given.second))
    builder.store(total, builder.inttoptr(address, ir.IntType(64).as_pointer()))


@njit(inline="always")
def store_through(form, address, first):  # type: ignore[no-untyped-def]
    store_sum(form, address, Pair(first, second=2))


def test_tuples_that_kernels_enclose_are_literal_also_behind_inlined_functions() -> None:
    form = (3, 4)

    @njit
    def run(target, first):  # type: ignore[no-untyped-def]
        store_through(form, target.ctypes.data, first)

    target = np.zeros(1, np.int64)
    run(target, 10)
    assert target[0] == 3 + 4 + 10 - 2, "fields of a NamedTuple no longer reach an intrinsic in their order"


def test_a_named_tuple_of_integers_is_a_run_of_words() -> None:
    @intrinsic
    def distance(typing_context, given):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            size = context.get_abi_sizeof(context.get_value_type(given))
            return ir.Constant(ir.IntType(64), size)

        return types.intp(given), generate

    @njit
    def size(first):  # type: ignore[no-untyped-def]
        return distance(Pair(first, first + 1))

    assert size(1) == 16, "a NamedTuple of two int64 no longer takes two words"


def test_a_compiled_function_can_be_called_from_an_intrinsic() -> None:
    @njit
    def double(x):  # type: ignore[no-untyped-def]
        return 2 * x

    double.compile((types.int64,))
    overload = double.overloads[(types.int64,)]
    for name in ("library", "fndesc", "signature"):
        assert hasattr(overload, name), f"a compiled overload has no {name} any more"
    assert overload.fndesc.mangled_name, "a compiled function has no name for the linker any more"
