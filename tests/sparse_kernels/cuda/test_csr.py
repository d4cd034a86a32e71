import itertools

import emulator
import numpy as np
import pytest
from mutations import fails
from mutations_csr import case_of
from mutations_nm import pruned
from vector_cases import bits, drawn, numbers, oracle

from sparse_kernels.cuda import csr
from sparse_kernels.cuda.program import DTYPES, NotSupported
from sparse_kernels.formats import pack
from sparse_kernels.patterns import NM, Unstructured
from sparse_kernels.plan_protocol import ACTIVATIONS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparsity", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (33, 70)], ids=str)
def test_entries_hold_the_weight_in_rows_that_get_shorter(rng, shape, sparsity, dtype):
    packed, weight = pruned(rng, Unstructured(), drawn(rng, shape, dtype), sparsity)
    program = csr.build_program(packed, dtype, "sm_80", 1)
    starts = program.indptr.astype(int)
    assert (np.diff(np.diff(starts)) <= 0).all()
    found = np.zeros(shape)
    for place, row in enumerate(program.order):
        for column, value in program.entries[starts[place] : starts[place + 1]]:
            found[row, column] += np.array(value, np.uint32).view(np.float32)
    np.testing.assert_array_equal(found, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_to_elements(rng, dtype):
    values = rng.standard_normal(1000).astype(np.float32)
    found = csr.round_values(values, dtype)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert (np.abs(found - values) <= unit * np.abs(values) + 2.0**-25).all()
    np.testing.assert_array_equal(numbers(bits(found, dtype), dtype), found)


def test_what_is_no_weight_of_this_kernel_is_refused():
    with pytest.raises(NotSupported, match="multiplies unstructured weights, not nm:2:4"):
        csr.build_program(pack(np.zeros((4, 4), np.float32), np.zeros((4, 4), bool), NM(2, 4)), "float16", "sm_80", 8)
    packed = pack(np.ones((4, 4), np.float32), None, Unstructured())
    with pytest.raises(NotSupported, match="elements are float16 or bfloat16, not float32"):
        csr.build_program(packed, "float32", "sm_80", 8)
    with pytest.raises(NotSupported, match="not sm_60"):
        csr.build_program(packed, "float16", "sm_60", 8)


def test_every_launch_is_a_known_variant():
    known = {variant.name for variant in csr.VARIANTS}
    assert len(known) == len(csr.VARIANTS)
    packed = pack(np.ones((70, 40), np.float32), None, Unstructured())
    for dtype, n in itertools.product(DTYPES, (1, 2, 6, 8, 100, 5000)):
        program = csr.build_program(packed, dtype, "sm_80", n)
        (launch,) = program.launches(n, None)
        assert launch.variant.name in known
        assert n % launch.variant.defines["VECTOR"] == 0
        assert program.launches(0, None) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparsity", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (16, 64, 8), (37, 70, 136), (33, 330, 50), (65, 3, 130), (17, 129, 67)], ids=str
)
def test_nothing_is_dropped_repeated_or_rounded(rng, size, sparsity, dtype):
    assert not fails(case_of(rng, size, dtype, sparsity=sparsity), seed=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activation_are_those_of_the_oracle(rng, dtype, activation):
    m, k, n = 70, 200, 24
    packed, weight = pruned(rng, Unstructured(), drawn(rng, (m, k), dtype), 0.6)
    x, bias = drawn(rng, (k, n), dtype), rng.standard_normal(m).astype(np.float32)
    out = np.empty((m, n), np.uint16)
    for b in (None, bias):
        emulator.run(
            csr.build_program(packed, dtype, "sm_75", n).launches(n, activation), bits(x, dtype), out, b, seed=0
        )
        expected, bound = oracle(weight, x, b, activation, dtype)
        assert (np.abs(numbers(out, dtype) - expected) <= bound).all()


def test_infinity_reaches_only_the_rows_that_read_it(rng):
    packed, weight = pruned(rng, Unstructured(), np.abs(drawn(rng, (40, 30), "float16")) + 1, 0.8)
    x = np.abs(drawn(rng, (30, 16), "float16"))
    x[5, 3] = np.inf
    out = np.empty((40, 16), np.float16)
    launches = csr.build_program(packed, "float16", "sm_80", 16).launches(16, None)
    emulator.run(launches, x.astype(np.float16), out, None, seed=0)
    expected = np.zeros((40, 16), bool)
    expected[:, 3] = weight[:, 5] != 0
    np.testing.assert_array_equal(np.isinf(out), expected)
    assert not np.isnan(out).any()
