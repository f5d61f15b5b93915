"""Compiled versions of the loops of all codecs; imported only if numba is installed and not turned off.

All loops and their helpers are in one file, because numba recompiles a cached loop only when the loop's own file has
changed, not when a helper's file has. Each loop writes the same bytes as the plain torch code, so it does the same
float32 operations in the same order. Three things make the loops fast:

- Magnitudes are compared as integers: the bit patterns of positive floats have the same order as the floats.
- Numbers are rounded to integers by adding and then subtracting 1.5 * 2**23.
- The inner loops run over slices of one block, from 0 to the block size, so that the compiler can vectorise them.

Arrays are flat. Each thread processes the blocks (or groups of elements) from `first` to `stop - 1`. The argument
`block` is the number of elements per block; `words` is `values` viewed as int32, that is, the bits of each float.
"""
# The functions have no annotations, as numba infers the types from a call's arguments.
# ruff: noqa: ANN001, ANN201, PLR0917
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from shardscope.training.compression.noise import MULTIPLIERS
from shardscope.training.compression.route import compiled, inlined

U32, I32, F32 = np.uint32, np.int32, np.float32
FIRST, SECOND = U32(MULTIPLIERS[0]), U32(MULTIPLIERS[1])
MAGNITUDE = I32(0x7FFF_FFFF)
ROUNDER = F32(1.5 * 2**23)
ZERO, ONE, HALF = F32(0), F32(1), F32(0.5)
TINY = F32(np.finfo(np.float32).tiny)
LARGEST = F32(np.finfo(np.float32).max)
SHRINK = F32(2.0**-32)
UNIT_16 = F32(2.0**-16)
FP8_LARGEST = F32(448)
FP8_NORMAL = U32(121 << 23)  # the bits of 2**-6, the smallest normal number of e4m3
FP8_SMALL = U32(141 << 23)  # the bits of 2**14: float32 has steps of 2**-9 there, e4m3's smallest number
FP8_SMALL_ROUNDER = F32(2.0**14)
FP8_REBIAS = U32(
    ((7 - 127) * 2**23 + 0x7FFFF) % 2**32
)  # changes the exponent's bias from 127 to 7, and adds just under half of the last bit kept, for rounding


@inlined
def draw(index, key, other):
    """Return a 32-bit hash of an element's index: `noise.draw` with all 32 bits; the upper bits are the most random."""
    word = U32(U32(index) + key)
    word = U32(U32(word ^ U32(word >> U32(16))) * FIRST)
    word = U32(word ^ U32(word >> U32(15)))
    return U32(U32(word + other) * SECOND)


@inlined
def peak_word(words):
    """Return the bits of the largest magnitude, given the bits of the values."""
    largest = I32(0)
    for i in range(words.size):
        largest = max(largest, I32(words[i] & MAGNITUDE))
    return I32(largest)


@inlined
def bits_of(value):
    """Return the bits of a float32 as an unsigned integer."""
    return F32(value).view(U32)


@inlined
def as_float(word):
    """Return the float32 whose bits are `word`."""
    return U32(word).view(F32)


@inlined
def pack(codes, count, bits, packed):
    """Pack the first `count` of `codes`, as `bits.pack_bits` does; up to seven codes that follow must be zero."""
    if bits == 8:
        for i in range(count):
            packed[i] = codes[i]
    elif bits == 4:
        for i in range((count + 1) >> 1):
            packed[i] = np.uint8(codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4)))
    elif bits == 2:
        for i in range((count + 3) >> 2):
            low = np.uint8(codes[4 * i] | np.uint8(codes[4 * i + 1] << np.uint8(2)))
            high = np.uint8(codes[4 * i + 2] | np.uint8(codes[4 * i + 3] << np.uint8(2)))
            packed[i] = np.uint8(low | np.uint8(high << np.uint8(4)))
    else:
        size = (count * bits + 7) >> 3
        for i in range((count + 7) >> 3):
            word = np.uint64(0)
            for k in range(8):
                word |= np.uint64(codes[8 * i + k]) << np.uint64(k * bits)
            for k in range(min(bits, size - i * bits)):
                packed[i * bits + k] = np.uint8((word >> np.uint64(8 * k)) & np.uint64(255))


@inlined
def unpack(packed, bits, count, codes):  # noqa: C901 - compiled as one loop
    """Unpack `count` integers to `codes`, as `bits.unpack_bits` does; overwrites up to seven more of `codes`."""
    if bits == 8:
        for i in range(count):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range((count + 1) >> 1):
            codes[2 * i] = packed[i] & np.uint8(15)
            codes[2 * i + 1] = packed[i] >> np.uint8(4)
    elif bits == 2:
        for i in range((count + 3) >> 2):
            for k in range(4):
                codes[4 * i + k] = np.uint8(packed[i] >> np.uint8(2 * k)) & np.uint8(3)
    else:
        size = (count * bits + 7) >> 3
        for i in range((count + 7) >> 3):
            word = np.uint64(0)
            for k in range(min(bits, size - i * bits)):
                word |= np.uint64(packed[i * bits + k]) << np.uint64(8 * k)
            for k in range(8):
                codes[8 * i + k] = np.uint8((word >> np.uint64(k * bits)) & np.uint64((1 << bits) - 1))


@inlined
def pack_signs(words, packed):
    """Pack the sign bit of each float; the bit is 1 for a negative number."""
    whole = words.size >> 3
    for i in range(whole):
        byte = U32(0)
        for k in range(8):
            byte = U32(byte | U32(U32(U32(words[8 * i + k]) >> U32(31)) << U32(k)))
        packed[i] = np.uint8(byte)
    if words.size & 7:
        byte = U32(0)
        for k in range(words.size & 7):
            byte = U32(byte | U32(U32(U32(words[8 * whole + k]) >> U32(31)) << U32(k)))
        packed[whole] = np.uint8(byte)


@inlined
def unpack_signs(packed, count, words):
    """Unpack `count` sign bits to the sign positions (highest bits) of `words`; overwrites up to seven more words."""
    for i in range((count + 7) >> 3):
        byte = U32(packed[i])
        for k in range(8):
            words[8 * i + k] = U32(U32(byte >> U32(k)) << U32(31))


@inlined
def put(values, out, mode):
    """Assign (mode 0) or add (1) the first ``out.size`` of `values` to `out`, or subtract (2) them from `out`."""
    if mode == 0:
        for i in range(out.size):
            out[i] = values[i]
    elif mode == 1:
        for i in range(out.size):
            out[i] += values[i]
    else:
        for i in range(out.size):
            out[i] -= values[i]


@inlined
def inverse_of(scale):
    """Return 1 / `scale`, or 0 for a scale of 0."""
    return ONE / scale if scale > ZERO else ZERO


@inlined
def peak_scale(words, largest):
    """Return the scale for one block, computed as in `scaled.peak_scale`."""
    scale = F32(as_float(peak_word(words)) / largest)
    if F32(scale * largest) > LARGEST:
        scale = as_float(bits_of(scale) - U32(1))
    return scale if scale >= TINY else ZERO


@inlined
def round_stochastically(values, start, inverse, levels, keys, codes):
    """Round one block stochastically, as `qsgd.round_stochastically` does; the block begins at element `start`."""
    highest = levels + levels + HALF
    key, other = U32(U32(start) + keys[0]), keys[1]
    for i in range(values.size):
        noise = F32(I32(draw(i, key, other) >> U32(16))) * UNIT_16 + levels
        step = values[i] * inverse + noise
        codes[i] = np.uint8(I32(min(max(step, ZERO), highest)))
    codes[values.size :] = 0


@inlined
def halve(sums, width):
    """Sum the first `width` elements of `sums` in the order of `scaled.halving_sum`; overwrites `sums`."""
    while width > 1:
        half = (width + 1) >> 1
        lower, upper = sums[: width - half], sums[half:width]
        for i in range(lower.size):
            lower[i] += upper[i]
        width = half
    return sums[0]


@inlined
def add_magnitudes(values, factor, sums, block):
    """Return the sum over `values` of magnitude times `factor`; `sums` is a work array of `block` elements."""
    for i in range(values.size):
        sums[i] = abs(values[i]) * factor
    sums[values.size :] = ZERO
    return halve(sums, block)


@compiled
def encode_nearest(values, words, scales, packed, block, bits, first, stop):
    """Encode for `blocks.BlockInt`: quantize each block to integers by rounding to nearest."""
    largest = F32((1 << (bits - 1)) - 1)
    codes = np.zeros(block + 8, np.uint8)
    for b in range(first, stop):
        start = b * block
        own = values[start : start + block]
        scales[b] = peak_scale(words[start : start + block], largest)
        inverse = inverse_of(scales[b])
        for i in range(own.size):
            rounded = F32(F32(own[i] * inverse) + ROUNDER) - ROUNDER
            codes[i] = np.uint8(I32(rounded + largest))
        codes[own.size :] = 0
        pack(codes, own.size, bits, packed[start * bits >> 3 :])


@compiled
def encode_stochastically(values, words, scales, packed, block, bits, keys, first, stop):
    """Encode for `qsgd.Qsgd`: quantize each block to integers by stochastic rounding."""
    levels = F32((1 << (bits - 1)) - 1)
    codes = np.zeros(block + 8, np.uint8)
    for b in range(first, stop):
        start = b * block
        own = values[start : start + block]
        scales[b] = peak_scale(words[start : start + block], levels)
        round_stochastically(own, start, inverse_of(scales[b]), levels, keys, codes)
        pack(codes, own.size, bits, packed[start * bits >> 3 :])


@compiled
def decode_integers(scales, packed, out, block, bits, mode, first, stop):
    """Decode for `blocks.BlockInt` and `qsgd.Qsgd`, and for `ternary.Ternary`, whose blocks share a single scale."""
    zero = F32((1 << (bits - 1)) - 1)
    codes, values = np.zeros(block + 8, np.uint8), np.empty(block, F32)
    for b in range(first, stop):
        start = b * block
        own = out[start : start + block]
        scale = scales[min(b, scales.size - 1)]
        unpack(packed[start * bits >> 3 :], bits, own.size, codes)
        for i in range(block):
            values[i] = (F32(codes[i]) - zero) * scale
        put(values, own, mode)


@compiled
def encode_float8(values, words, scales, packed, block, first, stop):
    """Encode for `fp8.BlockFloat8`: scale each block and round its elements to fp8 (e4m3)."""
    for b in range(first, stop):
        start = b * block
        own, codes = values[start : start + block], packed[start : start + block]
        scales[b] = peak_scale(words[start : start + block], FP8_LARGEST)
        inverse = inverse_of(scales[b])
        for i in range(own.size):
            word = bits_of(own[i] * inverse)
            magnitude = U32(word & U32(0x7FFF_FFFF))
            normal = U32(U32(magnitude + FP8_REBIAS + U32(U32(magnitude >> U32(20)) & U32(1))) >> U32(20))
            small = U32(bits_of(as_float(magnitude) + FP8_SMALL_ROUNDER) - FP8_SMALL)
            code = small if magnitude < FP8_NORMAL else normal
            codes[i] = np.uint8(U32(code | U32(U32(word >> U32(24)) & U32(128))))


@compiled
def decode_float8(scales, packed, table, out, block, mode, first, stop):
    """Decode for `fp8.BlockFloat8`; `table` has the values of the 256 fp8 codes."""
    values = np.empty(block, F32)
    for b in range(first, stop):
        start = b * block
        own, codes = out[start : start + block], packed[start : start + block]
        scale = scales[b]
        for i in range(own.size):
            values[i] = table[codes[i]] * scale
        put(values, own, mode)


@compiled
def encode_block_signs(values, words, scales, packed, block, first, stop):
    """Encode for `signs.BlockSign`: the mean magnitude of each block (as in `scaled.mean_magnitudes`), and signs."""
    sums = np.empty(block, F32)
    for b in range(first, stop):
        start = b * block
        own = values[start : start + block]
        mean = F32(add_magnitudes(own, ONE, sums, block) / F32(own.size))
        if mean > LARGEST:
            mean = F32(add_magnitudes(own, SHRINK, sums, block) / F32(own.size))
            mean = min(mean, F32(LARGEST * SHRINK)) / SHRINK
        scales[b] = mean
        pack_signs(words[start : start + block], packed[start >> 3 :])


@compiled
def encode_votes(values, words, packed, seed, block, first, stop):
    """Encode for `signs.Vote`: signs only; the sign for a zero alternates with the index, and depends on `seed`."""
    signs = np.empty(block, I32)
    for b in range(first, stop):
        start = b * block
        own, bits = values[start : start + block], words[start : start + block]
        for i in range(own.size):
            turn = I32(U32(U32(start + i) + seed) << U32(31))
            signs[i] = turn if own[i] == ZERO else bits[i]
        pack_signs(signs[: own.size], packed[start >> 3 :])


@compiled
def conclude_votes(counted, tie, block, first, stop):
    """Turn sums of votes into signs, as in `signs.MajorityVote.conclude_`.

    A tie gives `tie` for elements with an even index and `-tie` for those with an odd index; `block` is even.
    """
    for b in range(first, stop):
        own = counted[b * block : (b + 1) * block]
        for i in range(own.size):
            turn = tie if i & 1 == 0 else -tie
            own[i] = ONE if own[i] > ZERO else -ONE if own[i] < ZERO else turn


@compiled
def decode_signs(scales, packed, out, block, mode, first, stop):
    """Decode for `signs.BlockSign`, and for `signs.Vote`, whose blocks share a single scale."""
    values, words = np.empty(block, F32), np.empty(block, U32)
    for b in range(first, stop):
        start = b * block
        own = out[start : start + block]
        scale = bits_of(scales[min(b, scales.size - 1)])
        unpack_signs(packed[start >> 3 :], own.size, words)
        for i in range(own.size):
            values[i] = as_float(U32(scale ^ words[i]))
        put(values, own, mode)


@compiled
def measure(values, words, peaks, squares, block, first, stop):
    """Compute the largest magnitude (as bits) and the sum of squares for each block, for `ternary.Ternary`."""
    sums = np.empty(block, np.float64)
    for b in range(first, stop):
        start = b * block
        own = values[start : start + block]
        peaks[b] = peak_word(words[start : start + block])
        for i in range(own.size):
            sums[i] = np.float64(own[i]) * np.float64(own[i])
        sums[own.size :] = 0.0
        squares[b] = halve(sums, block)


@compiled
def encode_ternary(values, scale, packed, block, keys, first, stop):
    """Encode for `ternary.Ternary`, given the common scale of all blocks."""
    codes = np.zeros(block + 8, np.uint8)
    for b in range(first, stop):
        start = b * block
        own = values[start : start + block]
        round_stochastically(own, start, inverse_of(scale), ONE, keys, codes)
        pack(codes, own.size, 2, packed[start >> 2 :])


@compiled
def encode_natural(words, exponents, signs, block, keys, first, stop):
    """Encode for `natural.Natural`: stochastically round magnitudes to powers of two; pack exponents and signs."""
    for b in range(first, stop):
        start = b * block
        own, raised = words[start : start + block], exponents[start : start + block]
        for i in range(own.size):
            noise = U32(draw(start + i, keys[0], keys[1]) >> U32(9))
            word = U32(U32(U32(own[i]) & U32(0x7FFF_FFFF)) + noise)
            raised[i] = np.uint8(min(U32(word >> U32(23)), U32(254)))
        pack_signs(own, signs[start >> 3 :])


@compiled
def decode_natural(exponents, signs, out, block, mode, first, stop):
    """Decode for `natural.Natural`: rebuild each float from its exponent and sign."""
    values, words = np.empty(block, F32), np.empty(block, U32)
    for b in range(first, stop):
        start = b * block
        own, raised = out[start : start + block], exponents[start : start + block]
        unpack_signs(signs[start >> 3 :], own.size, words)
        for i in range(own.size):
            values[i] = as_float(U32(words[i] | U32(U32(raised[i]) << U32(23))))
        put(values, own, mode)
