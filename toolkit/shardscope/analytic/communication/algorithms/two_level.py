"""Rings on two levels: inside nodes and across nodes, or along the rows and columns of a torus."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm, Option
from shardscope.analytic.communication.algorithms.ring import RING
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase
from shardscope.analytic.communication.ring import Floats
from shardscope.errors import SpecError

_SCATTERS, _GATHERS = ("all_reduce", "reduce_scatter"), ("all_reduce", "all_gather")


def _levels(
    op: str, message: CollectiveInput, inner: Floats, *, inside: bool, names: tuple[str, str]
) -> Cost:
    """Return the cost of a collective operation composed of rings on two levels.

    An all-reduce, for example, is a reduce-scatter over rings of `inner` workers, an all-reduce of each part over rings
    of W / `inner` workers, and an all-gather over the first rings.

    Args:
        op: The collective operation.
        message: The message, with W workers.
        inner: Number of workers in each ring of the first level.
        inside: Whether the first level uses the links inside nodes.
        names: Name of each level, such as ``("inside nodes", "across nodes")``.
    """
    one = message._replace(workers=inner)
    other = message._replace(num_bytes=message.num_bytes / inner, workers=message.workers / inner)
    phases, sent = [], np.zeros(())
    for wanted, part in ((_SCATTERS, "reduce_scatter"), (_GATHERS, "all_gather")):
        if op in wanted:
            cost = RING.cost(part, one)
            (around,) = cost.phases
            name = f"{part.replace('_', '-')} {names[0]}"
            phases.append(Phase(name, around.steps, around.num_bytes, around.reduced, inside=inside))
            sent = sent + cost.sent
    across = RING.cost(op, other)
    (around,) = across.phases
    phases.insert(
        0 if op == "all_gather" else 1,
        Phase(f"{op.replace('_', '-')} {names[1]}", around.steps, around.num_bytes, around.reduced),
    )
    carried = across.sent if inside else np.maximum(across.sent, sent)
    return Cost(tuple(phases), sent + across.sent, carried)


def _hierarchical(op: str) -> Callable[..., Cost]:
    """Return the cost function of an operation over rings inside nodes and across nodes."""

    def cost(message: CollectiveInput, per_node: Floats) -> Cost:
        inner = np.minimum(per_node, message.workers)
        check_divides("per_node", inner, message.workers)
        return _levels(op, message, inner, inside=True, names=("inside nodes", "across nodes"))

    return cost


def _torus(op: str) -> Callable[..., Cost]:
    """Return the cost function of an operation over the rows and columns of a torus."""

    def cost(message: CollectiveInput, columns: Floats | None) -> Cost:
        inner = squarest_columns(message.workers) if columns is None else columns
        check_divides("columns", inner, message.workers)
        return _levels(op, message, inner, inside=False, names=("along rows", "along columns"))

    return cost


def check_divides(field: str, parts: Floats, workers: Floats) -> None:
    """Check that `parts` divides the number of workers.

    Raises:
        SpecError: `parts` does not divide the number; the message names `field`.
    """
    parts, workers = np.broadcast_arrays(parts, workers)
    bad = workers % parts != 0
    if bad.any():
        part, count = int(parts[bad].flat[0]), int(workers[bad].flat[0])
        near = np.gcd(part, count)
        raise SpecError(f"{field}={part} does not divide workers={count}; use a divisor, such as {near}")


def squarest_columns(workers: Floats) -> Floats:
    """Return the largest divisor of W that does not exceed its square root: the columns of the squarest torus."""
    unique, where = np.unique(workers, return_inverse=True)
    best = [_largest_divisor(int(count)) for count in unique]
    columns: Floats = np.array(best, dtype=np.float64)[where].reshape(np.shape(workers))
    return columns


def _largest_divisor(count: int) -> int:
    candidates = np.arange(1, int(np.sqrt(count)) + 1)
    return int(candidates[count % candidates == 0].max())


HIERARCHICAL = Algorithm(
    title="hierarchical",
    since=2017,
    source="Cho et al. 2017 (PowerAI DDL); Jia et al. 2018; also implemented by Shardscope's `hierarchical`",
    about="Rings inside nodes reduce-scatter the tensor over the g workers of a node, rings across nodes all-reduce "
    "the parts, and rings inside nodes all-gather them. Slow links carry 1/g of the bytes that a flat ring sends.",
    costs={op: _hierarchical(op) for op in ("all_reduce", "reduce_scatter", "all_gather")},
    formulas={
        "all_reduce": "2[(g−1)αᵢ + (g−1)/g · S/Bᵢ] + 2(n−1)α + 2(n−1)/n · S/(gB) + (W−1)/W · S/γ,  n = W/g",
        "reduce_scatter": "(g−1)αᵢ + (g−1)/g · S/Bᵢ + (n−1)α + (n−1)/n · S/(gB) + (W−1)/W · S/γ,  n = W/g",
        "all_gather": "(n−1)α + (n−1)/n · S/(gB) + (g−1)αᵢ + (g−1)/g · S/Bᵢ,  n = W/g",
    },
    options={
        "per_node": Option(8, "g: workers per node; with fewer workers, all are in one node", 1),
        "inner_bandwidth": Option(
            None,
            "Bᵢ: bandwidth inside a node, bytes/s; None: as across nodes",
            0,
            is_whole=False,
            is_open=True,
            is_time_only=True,
        ),
        "inner_latency": Option(
            None,
            "αᵢ: latency inside a node, seconds; None: as across nodes",
            0,
            is_whole=False,
            is_time_only=True,
        ),
    },
)
TORUS = Algorithm(
    title="2D torus",
    since=2018,
    source="Mikami et al. 2018 (arXiv 1811.05233); Ying et al. 2018",
    about="Workers are arranged in rows and columns: reduce-scatter along rows, all-reduce along columns, all-gather "
    "along rows.",
    costs={op: _torus(op) for op in ("all_reduce", "reduce_scatter", "all_gather")},
    formulas={
        "all_reduce": "2(c−1+r−1)α + 2(W−1)/W · S/B + (W−1)/W · S/γ,  W = c·r",
        "reduce_scatter": "(c−1+r−1)α + (W−1)/W · S/B + (W−1)/W · S/γ,  W = c·r",
        "all_gather": "(c−1+r−1)α + (W−1)/W · S/B,  W = c·r",
    },
    options={"columns": Option(None, "c: workers in a row; None makes the torus as square as possible", 1)},
)
