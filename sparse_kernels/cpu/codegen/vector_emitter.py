"""Vector code of one width for one function, written with llvmlite: what the register tiles are made of.

NaN and infinity go through as in dense code: no flag here allows the compiler to assume their absence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from sparse_kernels.cpu.runtime.numba_internals import cgutils, read_compile_target

# What happens to the finished sums. PARTIAL: stored as they are, to be continued later.
PARTIAL, IDENTITY, RELU, GELU = -1, 0, 1, 2

# What a register tile multiplies: float32, or pairs of bfloat16, those by AVX512-BF16's unit where there is one, or
# quads of bytes: one of x (0 to 255) times one of w (-128 to 127), summed in 32 bits. Quads are multiplied by a unit
# that does just that (VNNI, Arm's I8MM), by one that wants both with a sign (Arm's DotProd), by one that multiplies
# pairs of 16 bits (all x86), or byte by byte.
FLOATS, PAIRS, PAIRS_BY_UNIT, QUADS_BY_BYTE, QUADS_BY_PAIRS, QUADS_BY_SIGNED, QUADS_BY_UNIT = range(7)
QUADS = (QUADS_BY_BYTE, QUADS_BY_PAIRS, QUADS_BY_SIGNED, QUADS_BY_UNIT)

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))


class _BF16(ir.Type):
    """LLVM's bfloat, of which llvmlite does not know; only AVX512-BF16's instructions ask for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BF16)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16 = _BF16()

# 2*Q(a) = erfc(a/sqrt(2)) is nearly 1/p(a)**4 for a >= 0. These are the coefficients of p from a**0 to a**10: a
# least-squares fit, reweighted until the largest error of max(a, 0.6)*Q(a) was 6e-8. In float32, gelu is then wrong
# by at most 3e-7 + |x|*6e-8, and by at most |x|*4.8e-7.
GELU_POLYNOMIAL = (
    1.0,
    0.19946809220256678,
    0.09952645979448602,
    0.025954243294208836,
    0.006360172171597445,
    -7.222039820794773e-05,
    0.0016649162961402068,
    -0.0007593026290009011,
    0.00028816170489576865,
    -5.317379945929177e-05,
    5.03503367371627e-06,
)
GELU_FLAT = 12.0  # from here on a*Q(a) is less than 1e-19

# Cephes' expf: (exp(r) - 1 - r) / r**2 for |r| <= ln 2 / 2, from the highest power down. For a smaller argument than
# this, exp is 0.
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
EXP_LEAST = -87.0


class Emitter:
    """Vector code of one width, written with one builder."""

    def __init__(self, builder: ir.IRBuilder, lanes: int, fused: bool) -> None:
        self.builder = builder
        self.lanes = lanes
        self.fused = fused
        self.vector = ir.VectorType(F32, lanes)

    def integer(self, value: int) -> ir.Constant:
        """Return a constant int64."""
        return ir.Constant(I64, value)

    def pointer(self, address: ir.Value, offset: ir.Value | None = None, kind: ir.Type = F32) -> ir.Value:
        """Return a pointer to `kind` from an integer address, `offset` elements further."""
        at = self.builder.inttoptr(address, kind.as_pointer())
        return at if offset is None else self.builder.gep(at, [offset])

    def address(self, address: ir.Value, offset: ir.Value) -> ir.Value:
        """Return an integer address, `offset` floats further."""
        return self.builder.add(address, self.builder.mul(offset, self.integer(4)))

    def row(self, address: ir.Value, row: int, rows: ir.Value | None, stride: ir.Value) -> ir.Value:
        """Return a pointer to a row of floats; beyond the last of `rows` (>= 1) rows, to the last one."""
        number: ir.Value = self.integer(row)
        if rows is not None:
            last = self.builder.sub(rows, self.integer(1))
            number = self.builder.select(self.builder.icmp_signed("<", last, number), last, number)
        return self.pointer(address, self.builder.mul(number, stride))

    def load_integers(self, address: ir.Value, count: int, kind: ir.IntType) -> list[ir.Value]:
        """`count` integers of this kind at an address, as int64."""
        at = self.pointer(address, kind=kind)
        loaded = [self.builder.load(self.builder.gep(at, [self.integer(i)])) for i in range(count)]
        return [self.builder.sext(value, I64) for value in loaded] if kind is not I64 else loaded

    def at_vector(self, at: ir.Value, v: int) -> ir.Value:
        """Return a pointer to vector v behind a pointer to floats."""
        return self.builder.bitcast(self.builder.gep(at, [self.integer(v * self.lanes)]), self.vector.as_pointer())

    def load(self, at: ir.Value, v: int) -> ir.Value:
        """Vector v behind a pointer to floats."""
        return self.builder.load(self.at_vector(at, v), align=4)

    def load_bfloat16(self, at: ir.Value, v: int) -> ir.Value:
        """Vector v behind a pointer to bfloat16 (int16), as floats: their bits are the upper halves of a float's."""
        narrow, wide = ir.VectorType(I16, self.lanes), ir.VectorType(I32, self.lanes)
        at = self.builder.gep(at, [self.integer(v * self.lanes)])
        halves = self.builder.load(self.builder.bitcast(at, narrow.as_pointer()), align=2)
        bits = self.builder.shl(self.builder.zext(halves, wide), ir.Constant(wide, [16] * self.lanes))
        return self.builder.bitcast(bits, self.vector)

    def load_bytes(self, at: ir.Value, v: int) -> ir.Value:
        """Vector v behind a pointer to whole numbers of eight bits with a sign, as floats."""
        narrow, wide = ir.VectorType(I8, self.lanes), ir.VectorType(I32, self.lanes)
        at = self.builder.gep(at, [self.integer(v * self.lanes)])
        loaded = self.builder.load(self.builder.bitcast(at, narrow.as_pointer()), align=1)
        return self.builder.sitofp(self.builder.sext(loaded, wide), self.vector)

    def store(self, value: ir.Value, at: ir.Value, v: int) -> None:
        """Store to vector v behind a pointer to floats."""
        self.builder.store(value, self.at_vector(at, v), align=4)

    def mask(self, count: ir.Value) -> ir.Value:
        """Return a mask that is True for the first `count` lanes."""
        numbers = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        return self.builder.icmp_signed("<", numbers, self.splat(count))

    def kept(self, value: ir.Value, bits: ir.Value, other: ir.Value | None = None) -> ir.Value:
        """Return the lanes of a vector whose bits (int64, lane 0 lowest) are set; `other`, or 0, in the others."""
        bits = self.builder.trunc(bits, ir.IntType(self.lanes))
        mask = self.builder.bitcast(bits, ir.VectorType(ir.IntType(1), self.lanes))
        return self.builder.select(mask, value, ir.Constant(self.vector, None) if other is None else other)

    def load_masked(self, at: ir.Value, v: int, mask: ir.Value) -> ir.Value:
        """Vector v, 0 in lanes where the mask is False: they are not read."""
        pointer = self.at_vector(at, v)
        kind = ir.FunctionType(self.vector, [pointer.type, I32, mask.type, self.vector])
        load = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.load.v{self.lanes}f32.p0")
        return self.builder.call(load, [pointer, ir.Constant(I32, 4), mask, ir.Constant(self.vector, None)])

    def store_masked(self, value: ir.Value, at: ir.Value, v: int, mask: ir.Value) -> None:
        """Store the lanes of vector v where the mask is True."""
        pointer = self.at_vector(at, v)
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, I32, mask.type])
        store = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.store.v{self.lanes}f32.p0")
        self.builder.call(store, [value, pointer, ir.Constant(I32, 4), mask])

    def will_store(self, at: ir.Value) -> None:
        """Fetch the cache line at a pointer, which may point anywhere, because it will be written soon."""
        self._prefetch(at, 1, 2)

    def will_load(self, at: ir.Value, close: bool = False) -> None:
        """Fetch the cache line at a pointer, which may point anywhere, because it will be read soon.

        To the second-level cache, or `close`, to the first.
        """
        self._prefetch(at, 0, 3 if close else 2)

    def _prefetch(self, at: ir.Value, write: int, near: int) -> None:
        at = self.builder.bitcast(at, F32.as_pointer())  # a module declares the function with one type only
        kind = ir.FunctionType(ir.VoidType(), [at.type, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(prefetch, [at, *(ir.Constant(I32, value) for value in (write, near, 1))])

    def splat(self, value: ir.Value) -> ir.Value:
        """Return a scalar in all lanes of a vector."""
        kind = ir.VectorType(value.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, self.lanes), None))

    def splat_four(self, at: ir.Value) -> list[ir.Value]:
        """Four floats that lie beside each other, each in all lanes of a vector.

        One load and four shuffles inside of 128 bits instead of four loads: where a loop waits for loads that is
        faster. The fence does nothing but keep LLVM from turning it back into four loads.
        """
        builder = self.builder
        four = ir.VectorType(F32, 4)
        loaded = builder.load(builder.bitcast(at, four.as_pointer()), align=4)
        undefined = ir.Constant(four, ir.Undefined)
        lanes = ir.VectorType(I32, self.lanes)
        wide = builder.shuffle_vector(loaded, undefined, ir.Constant(lanes, [i % 4 for i in range(self.lanes)]))
        kind = ir.FunctionType(self.vector, [self.vector])
        fence = cgutils.get_or_insert_function(builder.module, kind, f"llvm.arithmetic.fence.v{self.lanes}f32")
        wide = builder.call(fence, [wide])
        return [self._shuffle(wide, wide, [i // 4 * 4 + j for i in range(self.lanes)]) for j in range(4)]

    def load_pair(self, at: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Two int32 that lie beside each other and are not negative, as int64, in one load."""
        both = self.builder.load(self.builder.bitcast(at, I64.as_pointer()), align=4)
        return self.builder.and_(both, self.integer(2**32 - 1)), self.builder.lshr(both, self.integer(32))

    def load_four_shorts(self, at: ir.Value) -> list[ir.Value]:
        """Four int16 that lie beside each other, without a sign, as int64, in one load."""
        together = self.builder.load(self.builder.bitcast(at, I64.as_pointer()), align=4)
        each = [self.builder.lshr(together, self.integer(16 * i)) for i in range(4)]
        return [*(self.builder.and_(value, self.integer(2**16 - 1)) for value in each[:3]), each[3]]

    def zeros(self, count: int) -> list[ir.Value]:
        """`count` vectors of 0."""
        return [ir.Constant(self.vector, None)] * count

    def constant(self, value: float) -> ir.Constant:
        """Return a vector of one constant."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a * b + c, fused where the target can."""
        if not self.fused:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{self.lanes}f32")
        return self.builder.call(fma, [a, b, c])

    def doubled(self, x: ir.Value, numbers: int) -> ir.Value:
        """Return the bits of the nearest bfloat16, ties to even, of each lane, in both halves of its 32 bits."""
        builder, wide = self.builder, ir.VectorType(I32, self.lanes)
        if numbers == PAIRS_BY_UNIT:
            narrow = ir.VectorType(BF16, self.lanes)
            kind = ir.FunctionType(narrow, [self.vector])
            name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * self.lanes}"
            rounded = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])
            upper = builder.zext(builder.bitcast(rounded, ir.VectorType(I16, self.lanes)), wide)
        else:
            bits = builder.bitcast(x, wide)
            half = ir.Constant(wide, [16] * self.lanes)
            odd = builder.and_(builder.lshr(bits, half), ir.Constant(wide, [1] * self.lanes))
            upper = builder.add(bits, builder.add(odd, ir.Constant(wide, [0x7FFF] * self.lanes)))
            quiet = builder.or_(bits, ir.Constant(wide, [1 << 22] * self.lanes))
            upper = builder.select(builder.fcmp_unordered("uno", x, x), quiet, upper)
            upper = builder.lshr(upper, half)
        upper = builder.or_(upper, builder.shl(upper, ir.Constant(wide, [16] * self.lanes)))
        return builder.bitcast(upper, self.vector)

    def as_read(self, x: ir.Value, numbers: int) -> ir.Value:
        """Return a vector of x as tiles of such numbers read it."""
        return x if numbers == FLOATS else self.doubled(x, numbers)

    def paired(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the lower halves of a's lanes beside the upper halves of b's."""
        halves = ir.VectorType(I16, 2 * self.lanes)
        upper = ir.Constant(ir.VectorType(ir.IntType(1), 2 * self.lanes), [False, True] * self.lanes)
        a, b = self.builder.bitcast(a, halves), self.builder.bitcast(b, halves)
        return self.builder.bitcast(self.builder.select(upper, b, a), self.vector)

    def multiply_pairs(self, a: ir.Value, b: ir.Value, c: ir.Value, numbers: int) -> ir.Value:
        """c + a * b, lane by lane, for the lower halves of a and b as bfloat16 and for the upper ones."""
        builder = self.builder
        if numbers == PAIRS_BY_UNIT:
            halves = ir.VectorType(BF16, 2 * self.lanes)
            kind = ir.FunctionType(self.vector, [self.vector, halves, halves])
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}"
            dot = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(dot, [c, builder.bitcast(a, halves), builder.bitcast(b, halves)])
        for part in (self._lower, self._upper):
            c = self.multiply_add(part(a), part(b), c)
        return c

    def multiply_quads(self, x: ir.Value, w: ir.Value, sums: ir.Value, numbers: int) -> ir.Value:
        """Return sums + x * w for the four bytes of each lane: of x from 0 to 255, of w with a sign.

        QUADS_BY_SIGNED multiplies x less 128 instead; `build_quad_arrays` makes up for it. Vectors and sums are
        32-bit whole numbers in the place of floats. Nothing saturates: two products of bytes are more than 16 bits
        hold, so pairs are multiplied as 16 bits each.
        """
        builder, wide = self.builder, ir.VectorType(I32, self.lanes)
        x, w, total = (builder.bitcast(each, wide) for each in (x, w, sums))
        if numbers == QUADS_BY_SIGNED:
            x = builder.xor(x, self._whole(0x80808080))
        on_arm = read_compile_target().is_arm
        if numbers == QUADS_BY_UNIT or (numbers == QUADS_BY_SIGNED and on_arm):
            total = self._multiply_by_unit(x, w, total, numbers)
        elif numbers == QUADS_BY_PAIRS:
            for a, b in zip(self._even_and_odd(x, builder.lshr), self._even_and_odd(w, builder.ashr), strict=True):
                total = builder.add(total, self._multiply_shorts(a, b))
        else:
            shift = builder.ashr if numbers == QUADS_BY_SIGNED else builder.lshr
            for byte in range(4):
                a, b = (builder.shl(each, self._whole(24 - 8 * byte)) for each in (x, w))
                product = builder.mul(shift(a, self._whole(24)), builder.ashr(b, self._whole(24)))
                total = builder.add(total, product)
        return builder.bitcast(total, self.vector)

    def _multiply_by_unit(self, x: ir.Value, w: ir.Value, sums: ir.Value, numbers: int) -> ir.Value:
        """Return sums + x * w by the processor's own instruction for quads of bytes."""
        builder, quads = self.builder, sums.type
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
        if read_compile_target().is_arm:
            quads = ir.VectorType(I8, 4 * self.lanes)
            name = f"llvm.aarch64.neon.{'sdot' if numbers == QUADS_BY_SIGNED else 'usdot'}.v4i32.v16i8"
        kind = ir.FunctionType(sums.type, [sums.type, quads, quads])
        dot = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(dot, [sums, builder.bitcast(x, quads), builder.bitcast(w, quads)])

    def _even_and_odd(self, x: ir.Value, shift: Callable[[ir.Value, ir.Value], ir.Value]) -> list[ir.Value]:
        """Return bytes 0 and 2 of each lane, then bytes 1 and 3, as 16 bits; shift: right, with the sign or not."""
        halves = ir.VectorType(I16, 2 * self.lanes)
        eight = ir.Constant(halves, [8] * (2 * self.lanes))
        x = self.builder.bitcast(x, halves)
        return [shift(self.builder.shl(x, eight), eight), shift(x, eight)]

    def _multiply_shorts(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the products of each lane's two 16-bit numbers, summed in 32 bits."""
        halves, wide = ir.VectorType(I16, 2 * self.lanes), ir.VectorType(I32, self.lanes)
        name = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[self.lanes]
        kind = ir.FunctionType(wide, [halves, halves])
        multiply = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}")
        return self.builder.call(multiply, [a, b])

    def _whole(self, value: int) -> ir.Constant:
        """Return a vector of one 32-bit whole number."""
        return ir.Constant(ir.VectorType(I32, self.lanes), [value] * self.lanes)

    def to_bytes(self, x: ir.Value) -> ir.Value:
        """Return the nearest whole numbers, ties to even, from 0 to 255 as bytes; 0 for NaN."""
        return self.builder.trunc(self.to_whole(x), ir.VectorType(ir.IntType(8), self.lanes))

    def to_whole(self, x: ir.Value) -> ir.Value:
        """Return the nearest whole numbers, ties to even, from 0 to 255; 0 for NaN. Only the lowest byte is valid."""
        builder, zero, most = self.builder, ir.Constant(self.vector, None), self.constant(255.0)
        x = builder.select(builder.fcmp_ordered(">", x, zero), x, zero)
        x = builder.select(builder.fcmp_ordered("<", x, most), x, most)
        # Added to a float from 0 to 255 this leaves the nearest whole number in the lowest byte.
        return builder.bitcast(builder.fadd(x, self.constant(1.5 * 2.0**23)), ir.VectorType(I32, self.lanes))

    def join_quads(self, rows: Sequence[ir.Value], inverse: ir.Value, zero: ir.Value) -> ir.Value:
        """Return four vectors as bytes, x * inverse + zero each, side by side in the 32 bits of every lane."""
        builder, wide, joined = self.builder, ir.VectorType(I32, self.lanes), None
        read = [self.multiply_add(x, inverse, zero) for x in rows]
        if self.lanes == 16 and "avx512bw" in read_compile_target()[2]:
            return self._pack_quads(read)
        for byte, x in enumerate(read):
            low = builder.and_(self.to_whole(x), ir.Constant(wide, [255] * self.lanes))
            shifted = builder.shl(low, ir.Constant(wide, [8 * byte] * self.lanes))
            joined = shifted if joined is None else builder.or_(joined, shifted)
        return builder.bitcast(joined, self.vector)

    def _pack_quads(self, rows: Sequence[ir.Value]) -> ir.Value:
        """Do the rest of `join_quads` by instructions that narrow numbers and keep them in their range: half of the
        steps."""
        builder, wide = self.builder, ir.VectorType(I32, 16)
        shorts, narrow = ir.VectorType(I16, 32), ir.VectorType(I8, 64)

        def call(name: str, result: ir.Type, given: list[ir.Value]) -> ir.Value:
            kind = ir.FunctionType(result, [each.type for each in given])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.{name}")
            return builder.call(function, given)

        def whole(x: ir.Value) -> ir.Value:
            # What is no number, or beyond 32 bits, becomes the least number, and then 0. So only what is too large
            # has to be made less.
            large = self.constant(2.0**16)
            x = builder.select(builder.fcmp_ordered(">", x, large), large, x)
            given = [x, ir.Constant(wide, None), ir.Constant(I16, -1), ir.Constant(I32, 4)]
            return call("mask.cvtps2dq.512", wide, given)

        a, b, c, d = (whole(x) for x in rows)
        pairs = [call("packssdw.512", shorts, [a, b]), call("packssdw.512", shorts, [c, d])]
        # In each 128 bits four bytes of a row follow those of the row before.
        packed = call("packuswb.512", narrow, pairs)
        order = [16 * part + 4 * row + lane for part in range(4) for lane in range(4) for row in range(4)]
        placed = builder.shuffle_vector(packed, packed, ir.Constant(ir.VectorType(I32, 64), order))
        return builder.bitcast(placed, self.vector)

    def worth(self, sums: ir.Value, offset: ir.Value, scale: ir.Value, bias: ir.Value | None = None) -> ir.Value:
        """Return (sums + offset) * scale, and a bias more; sums and offset: 32-bit whole numbers in the place of
        floats."""
        builder, wide = self.builder, ir.VectorType(I32, self.lanes)
        whole = builder.add(builder.bitcast(sums, wide), builder.bitcast(offset, wide))
        found = builder.sitofp(whole, self.vector)
        return builder.fmul(found, scale) if bias is None else self.multiply_add(found, scale, bias)

    def _lower(self, x: ir.Value) -> ir.Value:
        wide = ir.VectorType(I32, self.lanes)
        bits = self.builder.shl(self.builder.bitcast(x, wide), ir.Constant(wide, [16] * self.lanes))
        return self.builder.bitcast(bits, self.vector)

    def _upper(self, x: ir.Value) -> ir.Value:
        wide = ir.VectorType(I32, self.lanes)
        bits = self.builder.and_(self.builder.bitcast(x, wide), ir.Constant(wide, [0xFFFF0000] * self.lanes))
        return self.builder.bitcast(bits, self.vector)

    def add(self, a: ir.Value, b: ir.Value, numbers: int) -> ir.Value:
        """Return a + b, sums of such numbers."""
        if numbers not in QUADS:
            return self.builder.fadd(a, b)
        wide = ir.VectorType(I32, self.lanes)
        whole = self.builder.add(self.builder.bitcast(a, wide), self.builder.bitcast(b, wide))
        return self.builder.bitcast(whole, self.vector)

    def continued(
        self,
        start: ir.Value,
        sums: list[ir.Value],
        load: Callable[[], list[ir.Value]],
        numbers: int = FLOATS,
    ) -> list[ir.Value]:
        """Return the sums of such numbers, with what `load` gives added where start is not 0.

        Added behind the loop and not before, so that no multiply-add waits for sums that come from a distant cache.
        """
        return self.either(
            start, lambda: [self.add(a, b, numbers) for a, b in zip(sums, load(), strict=True)], lambda: sums
        )

    def either(
        self, condition: ir.Value, yes: Callable[[], list[ir.Value]], no: Callable[[], list[ir.Value]]
    ) -> list[ir.Value]:
        """Return what `yes` gives where the condition is not 0, or else `no`: as many vectors."""
        builder, found = self.builder, []
        with builder.if_else(builder.icmp_signed("!=", condition, self.integer(0))) as branches:
            for branch, way in zip(branches, (yes, no), strict=True):
                with branch:
                    vectors = way()
                    found.append((vectors, builder.block))
        joined = []
        for i in range(len(found[0][0])):
            joined.append(builder.phi(self.vector))
            for vectors, block in found:
                joined[-1].add_incoming(vectors[i], block)
        return joined

    def loop(
        self,
        stop: ir.Value,
        sums: list[ir.Value],
        step: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
        start: ir.Value | None = None,
        stride: int = 1,
    ) -> list[ir.Value]:
        """Return the sums after sums = step(c, sums) for c from `start` (0) to below `stop`, `stride` apart."""
        builder = self.builder
        before = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("columns", "column", "summed"))
        builder.branch(head)
        builder.position_at_end(head)
        c = builder.phi(I64)
        c.add_incoming(self.integer(0) if start is None else start, before)
        carried = [builder.phi(self.vector) for _ in sums]
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", c, stop), body, after)
        builder.position_at_end(body)
        stepped = step(c, list(carried))
        c.add_incoming(builder.add(c, self.integer(stride)), builder.block)
        for phi, value in zip(carried, stepped, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return list(carried)

    def in_tiles(self, length: ir.Value, tile: Callable[[ir.Value, ir.Value | None], None]) -> None:
        """Emit tile(first, None) for every whole vector of 0 .. length - 1, and tile(first, rest) for the rest."""
        builder = self.builder
        whole = builder.and_(length, self.integer(-self.lanes))

        def step(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            tile(first, None)
            return []

        self.loop(whole, [], step, stride=self.lanes)
        with builder.if_then(builder.icmp_signed("<", whole, length)):
            tile(whole, builder.sub(length, whole))

    def walk(self, first: ir.Value, count: ir.Value, step: Callable[[ir.Value], ir.Value]) -> None:
        """Repeat at = step(at), `count` times, from the pointer `first` on."""
        builder = self.builder
        before = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("items", "item", "walked"))
        builder.branch(head)
        builder.position_at_end(head)
        left, at = builder.phi(I64), builder.phi(first.type)
        left.add_incoming(count, before)
        at.add_incoming(first, before)
        builder.cbranch(builder.icmp_signed(">", left, self.integer(0)), body, after)
        builder.position_at_end(body)
        behind = step(at)
        left.add_incoming(builder.sub(left, self.integer(1)), builder.block)
        at.add_incoming(behind, builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def choose(self, value: ir.Value, cases: dict[int, Callable[[], None]]) -> None:
        """Emit the code of every case; the one that `value` names runs, none for any other value."""
        builder = self.builder
        done = builder.append_basic_block("done")
        choice = builder.switch(value, done)
        for name, emit in cases.items():
            block = builder.append_basic_block("case")
            choice.add_case(self.integer(name), block)
            builder.position_at_end(block)
            emit()
            builder.branch(done)
        builder.position_at_end(done)

    def finish(
        self,
        activation: ir.Value,
        sums: list[ir.Value],
        biases: Callable[[], list[ir.Value]] | None,
        store: Callable[[list[ir.Value]], None],
        value: Callable[[list[ir.Value]], list[ir.Value]] = list,
    ) -> None:
        """Store the sums as `activation` (one of the codes above) says, by one piece of code for all of them.

        biases: None where they are added already. value: what finished sums become before the bias is added.
        """
        builder = self.builder
        done = builder.append_basic_block("finished")
        ways = [(builder.block, sums)]  # PARTIAL
        choice = builder.switch(activation, done)
        for code, function in ((IDENTITY, None), (RELU, self.relu), (GELU, self.gelu)):
            block = builder.append_basic_block("activation")
            choice.add_case(self.integer(code), block)
            builder.position_at_end(block)
            totals = value(sums)
            if biases is not None:
                totals = [builder.fadd(total, bias) for total, bias in zip(totals, biases(), strict=True)]
            ways.append((builder.block, totals if function is None else [function(total) for total in totals]))
            builder.branch(done)
        builder.position_at_end(done)
        finished = [builder.phi(self.vector) for _ in sums]
        for block, totals in ways:
            for phi, total in zip(finished, totals, strict=True):
                phi.add_incoming(total, block)
        store(finished)

    def relu(self, x: ir.Value) -> ir.Value:
        """max(x, 0), NaN for NaN: a comparison with NaN is false."""
        zero = ir.Constant(self.vector, None)
        return self.builder.select(self.builder.fcmp_ordered("<", x, zero), zero, x)

    def gelu(self, x: ir.Value) -> ir.Value:
        """x * Phi(x) of one vector: a call, because sixteen copies in line would only fill the instruction cache."""
        module = self.builder.module
        kind = ir.FunctionType(self.vector, [self.vector])
        function = cgutils.get_or_insert_function(module, kind, f"sparse_kernels_gelu_{self.lanes}_{self.fused}")
        if function.is_declaration:
            function.linkage = "internal"
            function.attributes.add("noinline")
            builder = ir.IRBuilder(function.append_basic_block("entry"))
            builder.ret(Emitter(builder, self.lanes, self.fused)._gelu(function.args[0]))
        return self.builder.call(function, [x])

    def _gelu(self, x: ir.Value) -> ir.Value:
        """max(x, 0) - a*Q(a), a = |x| and Q the upper tail of the normal distribution; the limits at infinity."""
        builder = self.builder
        a = self.absolute(x)
        flat = self.constant(GELU_FLAT)
        a = builder.select(builder.fcmp_ordered(">", a, flat), flat, a)
        p = self.constant(GELU_POLYNOMIAL[-1])
        for coefficient in reversed(GELU_POLYNOMIAL[:-1]):
            p = self.multiply_add(p, a, self.constant(coefficient))
        for _ in range(2):
            p = builder.fmul(p, p)
        tail = builder.fdiv(builder.fmul(a, self.constant(0.5)), p)
        return builder.fsub(self.relu(x), tail)

    def absolute(self, x: ir.Value) -> ir.Value:
        """Return |x|, lane by lane."""
        kind = ir.FunctionType(self.vector, [self.vector])
        name = f"llvm.fabs.v{self.lanes}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [x])

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the larger of a and b, lane by lane; NaN where one is."""
        kind = ir.FunctionType(self.vector, [self.vector] * 2)
        name = f"llvm.maximum.v{self.lanes}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, b])

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the larger of a and b, lane by lane; a where one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), b, a)

    def over_lanes(self, x: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Return all lanes of x joined by an operation, in all lanes."""
        span = 1
        while span < self.lanes:
            x = join(x, self._shuffle(x, x, [i ^ span for i in range(self.lanes)]))
            span *= 2
        return x

    def exp(self, x: ir.Value) -> ir.Value:
        """exp(x) for x <= 0, within 2e-7 of it; 0 below -87, NaN for NaN.

        exp(x) = 2**n * exp(r) with n = x / ln 2 rounded by adding 1.5 * 2**23, whose last bits then are n.
        The polynomial for exp(r), |r| <= ln 2 / 2, is that of Cephes (Moshier 1984), expf.
        """
        builder = self.builder
        least = self.constant(EXP_LEAST)
        clamped = builder.select(builder.fcmp_ordered(">", x, least), x, least)
        magic = self.constant(12582912.0)
        shifted = self.multiply_add(clamped, self.constant(1.4426950408889634), magic)
        n = builder.fsub(shifted, magic)
        r = self.multiply_add(n, self.constant(-0.693359375), clamped)
        r = self.multiply_add(n, self.constant(2.12194440e-4), r)
        p = self.constant(EXP_POLYNOMIAL[0])
        for coefficient in EXP_POLYNOMIAL[1:]:
            p = self.multiply_add(p, r, self.constant(coefficient))
        p = builder.fadd(self.multiply_add(p, builder.fmul(r, r), r), self.constant(1.0))
        integers = ir.VectorType(I32, self.lanes)
        bits = builder.bitcast(shifted, integers)
        # The exponent's bits: n + 127, from the place that it has in `shifted` to its own.
        bias = ir.Constant(integers, [(127 - 0x4B400000) % 2**32] * self.lanes)
        power = builder.shl(builder.add(bits, bias), ir.Constant(integers, [23] * self.lanes))
        result = builder.fmul(p, builder.bitcast(power, self.vector))
        result = builder.select(builder.fcmp_ordered("<", x, least), self.constant(0.0), result)
        return builder.select(builder.fcmp_unordered("uno", x, x), x, result)

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Return the columns of a square tile, by shuffles that vector units do in one step.

        First four rows at a time, inside of each 128 bits; then those 128 bits between the groups of four rows.
        """
        n = self.lanes
        # inside[j][g]: in its 128 bits number q, column 4 * q + j of rows 4 * g to 4 * g + 3.
        fours = [self.transpose_inside(*rows[g : g + 4]) for g in range(0, n, 4)]
        inside = [list(column) for column in zip(*fours, strict=True)]
        between = [self._transpose_quarters(vectors) for vectors in inside]
        return [between[column % 4][column // 4] for column in range(n)]

    def transpose_at(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Return the columns of a square tile that lies in memory, from a pointer to each row: half as many shuffles.

        What `transpose` does between 128 bits last, loads of 128 bits into their place do first.
        """
        fours = (self.four_columns(rows, begin) for begin in range(0, self.lanes, 4))
        return [column for columns in fours for column in columns]

    def four_columns(self, rows: list[ir.Value], begin: int = 0) -> list[ir.Value]:
        """Four columns, from `begin` on, of as many rows as there are lanes, from a pointer to each row."""
        builder, n = self.builder, self.lanes
        four = ir.VectorType(F32, 4)

        def joined(number: int) -> ir.Value:
            """Return four elements each of rows number, number + 4, ..."""
            total = None
            for q in range(0, n, 4):
                at = builder.gep(rows[number + q], [self.integer(begin)])
                part = builder.load(builder.bitcast(at, four.as_pointer()), align=4)
                everywhere = ir.Constant(ir.VectorType(I32, n), [i % 4 for i in range(n)])
                wide = builder.shuffle_vector(part, ir.Constant(four, ir.Undefined), everywhere)
                here = ir.Constant(ir.VectorType(ir.IntType(1), n), [q <= i < q + 4 for i in range(n)])
                total = wide if total is None else builder.select(here, wide, total)
            return total

        return self.transpose_inside(*(joined(number) for number in range(4)))

    def transpose_inside(self, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value) -> list[ir.Value]:
        """Four vectors as rows of 4 x 4 tiles, one in each 128 bits: their columns. Twice is as they were."""
        n, out = self.lanes, []
        for high in (0, 2):
            pattern = [i + high for q in range(0, n, 4) for i in (q, n + q, q + 1, n + q + 1)]
            first, second = self._shuffle(a, b, pattern), self._shuffle(c, d, pattern)
            for upper in (0, 2):
                order = [i + upper for q in range(0, n, 4) for i in (q, q + 1, n + q, n + q + 1)]
                out.append(self._shuffle(first, second, order))
        return out

    def _transpose_quarters(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """out[q] = 128 bits number q of every vector, in their order; of 1, 2 or 4 vectors of as many quarters."""
        count = len(vectors)

        def joined(a: ir.Value, b: ir.Value, quarters: Sequence[int]) -> ir.Value:
            return self._shuffle(a, b, [4 * q + j for q in quarters for j in range(4)])

        if count == 1:
            return vectors
        if count == 2:
            a, b = vectors
            return [joined(a, b, (q, 2 + q)) for q in (0, 1)]
        a, b, c, d = vectors
        out = []
        for halves in ((0, 1, 4, 5), (2, 3, 6, 7)):
            ab, cd = joined(a, b, halves), joined(c, d, halves)
            out += [joined(ab, cd, quarters) for quarters in ((0, 2, 4, 6), (1, 3, 5, 7))]
        return out

    def every_other(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Elements 0, 2, 4, ... of two vectors end to end."""
        return self._shuffle(a, b, list(range(0, 2 * self.lanes, 2)))

    def _shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, self.lanes), lanes))
