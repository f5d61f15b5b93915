"""Data for the communication calculator's figures: curves against workers or message size, and scaling efficiency.

A `CommunicationQuestion` holds all inputs of the calculator. All formulas are in `shardscope.analytic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic import communication as comm
from shardscope.analytic.communication import ALGORITHMS
from shardscope.errors import SpecError

Floats = npt.NDArray[np.float64]
DOUBLINGS = 2 ** np.arange(17)
"""Numbers of workers at which curves have points: powers of two, because some algorithms' times jump between these."""
MOST_WORKERS = 4096
"""Largest number of workers on the curves, unless the question has more."""
SMALLEST, LARGEST = 1e3, 1e11
"""Smallest and largest message size on the axis, in bytes."""
_SIZES = np.geomspace(SMALLEST, LARGEST, 65)  # eight per decade


@dataclass(frozen=True)
class CommunicationQuestion:
    """Inputs of the calculator: the operation, the message size, the link and the algorithms to compare.

    Attributes:
        op: The collective operation.
        algorithms: Names of the algorithms to compare.
        num_bytes: Size of the tensor in bytes.
        workers: Total number of workers.
        bandwidth: Bandwidth of one worker in one direction, in bytes per second.
        latency: Latency per message, in seconds.
        options: Settings of each algorithm, by its name.
        compute_s: Compute time of one worker per step, in seconds; used for the efficiency.
        overlap: Fraction of the compute time that can hide communication, 0 to 1.
        codec_bandwidth: Rate at which compression and decompression of gradients read and write memory, in
            bytes per second.
    """

    op: str = "all_reduce"
    algorithms: tuple[str, ...] = ("parameter-server", "ring", "tree", "hierarchical")
    num_bytes: float = 1e8
    workers: int = 64
    bandwidth: float = 12.5e9
    latency: float = 5e-6
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    compute_s: float = 0.1
    overlap: float = 0.0
    codec_bandwidth: float = 2e12

    @property
    def link(self) -> dict[str, float]:
        """Bandwidth and latency, as keyword arguments for the formulas."""
        return {"bandwidth": self.bandwidth, "latency": self.latency}


class CostCurve(NamedTuple):
    """One algorithm's times and traffic as functions of `x`: the number of workers or the message size in bytes."""

    algorithm: str
    x: Floats
    seconds: Floats
    latency_s: Floats
    bandwidth_s: Floats
    sent_bytes: Floats
    """Bytes sent by the busiest worker."""


class Left(NamedTuple):
    """An algorithm left out of the figure, and the reason."""

    algorithm: str
    why: str


class CostCurvesInfo(NamedTuple):
    """Curves of all algorithms, the points where the fastest algorithm changes, and the algorithms left out."""

    question: CommunicationQuestion
    lines: tuple[CostCurve, ...]
    crossings: tuple[comm.Crossing, ...]
    left_out: tuple[Left, ...]


class Efficiency(NamedTuple):
    """Weak and strong scaling efficiency of one algorithm: speed-up over ideal speed-up, by number of workers."""

    algorithm: str
    workers: Floats
    weak: Floats
    strong: Floats


class EfficiencyInfo(NamedTuple):
    """The scaling efficiency of all algorithms."""

    question: CommunicationQuestion
    lines: tuple[Efficiency, ...]


def by_size_info(question: CommunicationQuestion) -> CostCurvesInfo:
    """Compute time and traffic against message size."""
    lines, left = [], []
    for name in question.algorithms:
        try:
            lines.append(_line(question, name, _SIZES, num_bytes=_SIZES, workers=question.workers))
        except SpecError as problem:
            left.append(Left(name, str(problem)))
    fixed = {"workers": question.workers, **question.link}
    crossings = _frontier(question, lines, over="num_bytes", points=_SIZES, **fixed)
    return CostCurvesInfo(question, tuple(lines), crossings, tuple(left))


def by_workers_info(question: CommunicationQuestion) -> CostCurvesInfo:
    """Compute time and traffic against the number of workers."""
    lines, left = [], []
    for name in question.algorithms:
        counts = _possible(question, name)
        if counts.size:
            lines.append(_line(question, name, counts, num_bytes=question.num_bytes, workers=counts))
        else:
            left.append(Left(name, "its settings are not valid for any number of workers"))
    shared = _shared(lines)
    fixed = {"num_bytes": question.num_bytes, **question.link}
    crossings = _frontier(question, lines, over="workers", points=shared, **fixed) if shared.size > 1 else ()
    return CostCurvesInfo(question, tuple(lines), crossings, tuple(left))


def efficiency_info(question: CommunicationQuestion) -> EfficiencyInfo:
    """Compute weak and strong scaling efficiency, for training steps that end with an all-reduce of the message."""
    lines = []
    for name in question.algorithms:
        if "all_reduce" not in ALGORITHMS[name].costs:
            continue
        counts = _possible(question, name, op="all_reduce")
        if not counts.size:
            continue
        kept = {
            scaling: comm.scaling_efficiency(
                compute_s=question.compute_s,
                num_bytes=question.num_bytes,
                workers=counts,
                algorithm=name,
                overlap=question.overlap,
                scaling=scaling,
                **question.link,
                **question.options.get(name, {}),
            )
            for scaling in ("weak", "strong")
        }
        lines.append(Efficiency(name, counts, kept["weak"], kept["strong"]))
    return EfficiencyInfo(question, tuple(lines))


def _line(question: CommunicationQuestion, name: str, x: Floats, **varied: Any) -> CostCurve:
    own: dict[str, Any] = {"op": question.op, "algorithm": name, **varied, **question.options.get(name, {})}
    found = comm.collective_outcome(**own, bandwidth=question.bandwidth, latency=question.latency)
    latency, bandwidth, sent = (
        np.broadcast_to(values, x.shape) for values in (found.latency_s, found.bandwidth_s, found.sent_bytes)
    )
    return CostCurve(name, x, latency + bandwidth, latency, bandwidth, sent)


def _possible(question: CommunicationQuestion, name: str, op: str = "") -> Floats:
    """Return the numbers of workers that are valid for an algorithm, including the question's own number if valid."""
    known, own = ALGORITHMS[name].options, question.options.get(name, {})
    per_node = own.get("per_node", known["per_node"].default) if "per_node" in known else 1
    counts: Floats = np.unique([*DOUBLINGS, *per_node * DOUBLINGS, question.workers]).astype(np.float64)
    is_suited = (counts > 1) & (counts <= max(MOST_WORKERS, question.workers))
    is_suited &= counts % np.minimum(per_node, counts) == 0
    if "dedicated" in known and not own.get("dedicated"):
        is_suited &= counts >= own.get("servers", 1)
    if name == "recursive-doubling" and (op or question.op) == "all_gather":
        is_suited &= np.log2(counts) % 1 == 0
    suited: Floats = counts[is_suited]
    return suited


def _shared(lines: list[CostCurve]) -> Floats:
    """Return the numbers of workers at which all lines have a point."""
    shared = set(lines[0].x).intersection(*(line.x for line in lines)) if lines else set()
    return np.array(sorted(shared))


def _frontier(
    question: CommunicationQuestion, lines: list[CostCurve], **how: Any
) -> tuple[comm.Crossing, ...]:
    if len(lines) < 2:
        return ()
    contenders = [(line.algorithm, question.options.get(line.algorithm, {})) for line in lines]
    return comm.frontier(contenders, op=question.op, **how)
