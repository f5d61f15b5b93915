"""LAMB's step on a GPU as one Triton kernel, which updates many tensors in a single launch.

The work on a layer is cut into tiles, and each tile is visited twice. The first visit updates the moments and sums the
squares of weights and update. The second visit needs the trust ratio, and so the sums over the whole layer; it computes
the update again from the stored moments, and moves the weights. Both visits together access memory 10 times per
element, compared with 7 times in a fused AdamW kernel; fewer if the second visit finds its three tensors in the L2
cache. To make this likely, the programs of the kernel work through one list of visits, in which a layer's second visits
follow shortly after its first visits (`_visits.stages_of`).

Each program takes the next visit from the list when it has finished the previous one. A second visit waits until the
sums of its layer are complete; it cannot wait forever, because these depend only on visits that were taken before it.
The order of additions does not depend on the order in which programs finish, so results are bitwise reproducible.

This module needs Triton.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN202, D417, PLR0917 - Triton infers the types of a kernel from its arguments

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(6)
"""Columns of the table of layers: the addresses of weights, gradient, first and second moment, the number of elements,
and the layer's first row in `partials`."""
CHUNK = tl.constexpr(512)
"""Number of tiles whose sums are added at once."""


@triton.jit(do_not_specialize=["num_visits", "epoch", "adapts"])
def step_layers(
    table, visits, partials, counters, results, grad_factor, num_visits, epoch, adapts, keep1, add1, keep2, add2,
    scale1, scale2, eps, decay, shrink, lr, clamp, largest_ratio, tile_size: tl.constexpr,
):  # fmt: skip
    """Update all layers of `table` by carrying out `visits` in order.

    Args:
        table: int64, a row of `COLUMNS` per layer.
        visits: int32, a row per visit: layer, and tile `t` as ``t`` on the first visit or ``-1 - t`` on the second.
        partials: float32, a row per tile of all layers, for its sums of squares of weights and update.
        counters: int32, zeros before the first launch: visits taken, programs done, and for each layer the number of
            tiles visited in this step and the last epoch whose sums are complete.
        results: float64, a row per layer: sums of squares of weights and update, and the trust ratio.
        grad_factor: float64, factor of all gradients.
        num_visits: Number of rows in `visits`.
        epoch: Number that differs from the epoch of the last step.
        adapts: 1 if layers have a trust ratio; 0 if the first visit also moves the weights.
        keep1: This and the next arguments up to `decay`: see `_torch_loops.factors_of`.
        shrink: Factor of the weights that is subtracted first, for decoupled weight decay.
        lr: Learning rate.
        clamp: Upper bound of the weight norm in the trust ratio.
        largest_ratio: Upper bound of the trust ratio.
        tile_size: Number of elements per tile.
    """
    factor = tl.load(grad_factor).to(tl.float32)
    visit = tl.atomic_add(counters, 1, sem="relaxed")
    while visit < num_visits:
        layer = tl.load(visits + 2 * visit)
        code = tl.load(visits + 2 * visit + 1)
        is_first = code >= 0
        tile = tl.where(is_first, code, -1 - code).to(tl.int64)
        row = table + COLUMNS * layer
        w, g, m, v = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        numel, first_tile = tl.load(row + 4), tl.load(row + 5)
        size = tl.minimum(numel - tile * tile_size, tile_size).to(tl.int32)
        is_whole = (size == tile_size) & ((w | g | m | v) % 16 == 0)
        w, g = _place(w, tile * tile_size), _place(g, tile * tile_size)
        m, v = _place(m, tile * tile_size), _place(v, tile * tile_size)
        arrivals = counters + 2 + 2 * layer
        if is_first:
            if is_whole:
                of_weights, of_update = _advance(
                    w, g, m, v, size, factor, keep1, add1, keep2, add2, scale1, scale2, eps, decay, shrink, lr, adapts,
                    tile_size, True,
                )  # fmt: skip
            else:
                of_weights, of_update = _advance(
                    w, g, m, v, size, factor, keep1, add1, keep2, add2, scale1, scale2, eps, decay, shrink, lr, adapts,
                    tile_size, False,
                )  # fmt: skip
            if adapts:
                tl.store(partials + 2 * (first_tile + tile), of_weights)
                tl.store(partials + 2 * (first_tile + tile) + 1, of_update)
                num_tiles = tl.maximum(tl.cdiv(numel, tile_size), 1).to(tl.int32)
                tl.debug_barrier()  # the tile counts as visited when all threads have written
                if tl.atomic_add(arrivals, 1, sem="acq_rel") == num_tiles - 1:
                    _conclude(results + 3 * layer, partials + 2 * first_tile, num_tiles, clamp, largest_ratio)
                    tl.store(arrivals, 0)
                    tl.debug_barrier()
                    tl.atomic_xchg(arrivals + 1, epoch, sem="release")
        else:
            while tl.atomic_add(arrivals + 1, 0, sem="acquire") != epoch:
                pass
            rate = (tl.load(results + 3 * layer + 2) * lr).to(tl.float32)
            if is_whole:
                _move(w, m, v, size, rate, scale1, scale2, eps, decay, shrink, tile_size, True)
            else:
                _move(w, m, v, size, rate, scale1, scale2, eps, decay, shrink, tile_size, False)
        visit = tl.atomic_add(counters, 1, sem="relaxed")
    if tl.atomic_add(counters + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        tl.store(counters + 1, 0)


@triton.jit
def _place(address, start):
    return address.to(tl.pointer_type(tl.float32)) + start


@triton.jit
def _read(start, size, tile_size: tl.constexpr, whole: tl.constexpr, evict: tl.constexpr):
    if (
        whole
    ):  # nothing is masked, and the address is known to be aligned: one instruction reads four elements
        values = tl.load(tl.multiple_of(start, 16) + tl.arange(0, tile_size), eviction_policy=evict)
    else:
        places = tl.arange(0, tile_size)
        values = tl.load(start + places, mask=places < size, other=0.0, eviction_policy=evict)
    return values


@triton.jit
def _write(start, values, size, tile_size: tl.constexpr, whole: tl.constexpr, evict: tl.constexpr):
    if whole:
        tl.store(tl.multiple_of(start, 16) + tl.arange(0, tile_size), values, eviction_policy=evict)
    else:
        places = tl.arange(0, tile_size)
        tl.store(start + places, values, mask=places < size, eviction_policy=evict)


@triton.jit
def _shrunk(weights, shrink):
    return tl.where(shrink != 0, weights - shrink * weights, weights)  # 0 times an infinite weight is NaN


@triton.jit
def _update(weights, moment, square, scale1, scale2, eps, decay):
    update = tl.div_rn(moment * scale1, tl.sqrt_rn(square) * scale2 + eps)
    return tl.where(decay != 0, update + decay * weights, update)


@triton.jit
def _advance(
    w, g, m, v, size, factor, keep1, add1, keep2, add2, scale1, scale2, eps, decay, shrink, lr, adapts,
    tile_size: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Update the moments of a tile, and without trust ratios also its weights; return both sums of squares."""
    grad = _read(g, size, tile_size, whole, "evict_first")
    moment = _read(m, size, tile_size, whole, "")
    square = _read(v, size, tile_size, whole, "")
    weights = _read(w, size, tile_size, whole, "")
    grad *= factor
    moment = keep1 * moment + add1 * grad
    square = keep2 * square + add2 * grad * grad
    _write(m, moment, size, tile_size, whole, "")
    _write(v, square, size, tile_size, whole, "")
    weights = _shrunk(weights, shrink)
    update = _update(weights, moment, square, scale1, scale2, eps, decay)
    if not whole:
        update = tl.where(tl.arange(0, tile_size) < size, update, 0.0)  # with eps=0, it is NaN beyond the end
    if adapts == 0:
        _write(w, weights - lr * update, size, tile_size, whole, "")
    return tl.sum(weights * weights), tl.sum(update * update)


@triton.jit
def _move(
    w, m, v, size, rate, scale1, scale2, eps, decay, shrink, tile_size: tl.constexpr, whole: tl.constexpr
):
    """Update the weights of a tile; its three tensors are read for the last time, so the cache may evict them."""
    weights = _read(w, size, tile_size, whole, "evict_first")
    moment = _read(m, size, tile_size, whole, "evict_first")
    square = _read(v, size, tile_size, whole, "evict_first")
    weights = _shrunk(weights, shrink)
    update = _update(weights, moment, square, scale1, scale2, eps, decay)
    _write(w, weights - rate * update, size, tile_size, whole, "evict_first")


@triton.jit
def _conclude(result, partials, num_tiles, clamp, largest_ratio):
    """Add up the sums of all tiles of a layer, in order of the tiles, and compute the layer's trust ratio."""
    of_weights = tl.zeros([CHUNK], tl.float64)
    of_update = tl.zeros([CHUNK], tl.float64)
    start = 0
    while start < num_tiles:
        tiles = start + tl.arange(0, CHUNK)
        of_weights += tl.load(partials + 2 * tiles, mask=tiles < num_tiles, other=0.0).to(tl.float64)
        of_update += tl.load(partials + 2 * tiles + 1, mask=tiles < num_tiles, other=0.0).to(tl.float64)
        start += CHUNK
    weight_square, update_square = tl.sum(of_weights), tl.sum(of_update)
    norm, divisor = tl.sqrt(weight_square), tl.sqrt(update_square)
    ratio = tl.where(norm > clamp, clamp, norm) / divisor  # unlike a minimum, keeps NaN
    ratio = tl.where(ratio > largest_ratio, largest_ratio, ratio)
    tl.store(result, weight_square)
    tl.store(result + 1, update_square)
    tl.store(result + 2, tl.where((norm > 0) & (divisor > 0), ratio, 1.0))
