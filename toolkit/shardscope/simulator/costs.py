"""Times of a layout's passes and collectives, from the formulas of `predict`, with messages divided by link.

For each collective, the simulator needs its latency and the time for which it occupies a link if nothing else uses the
link. This time follows from the formula on the same cluster without latencies; the latency is the remainder.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.ring import is_inside_node
from shardscope.analytic.compute.work import Split
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.offload import OFFLOADS_OPTIMIZER
from shardscope.analytic.schedules.closed import columns
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.layer_shape import factor_of, shape_of
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.micro import Pass, SlowestStage, stage
from shardscope.prediction.step.step import StepRows, cut, host_seconds, host_update, step_work
from shardscope.prediction.step.term import NAMES
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

COLLECTIVES = ("tensor", "context", "expert")
GRADIENTS = NAMES["data_comm"]
FORWARD, BACKWARD, EDGE = "forward", "backward", "embedding and output"
"""Parts of ``compute`` in a predicted step time."""


class Piece(NamedTuple):
    """A computation or collective: its term, fixed seconds, and seconds for which it occupies a link of its own."""

    kind: str
    fixed: float
    wire: float = 0.0
    link: str = ""
    """``intra``, ``inter``, or empty for a computation."""

    def times(self, factor: float) -> Piece:
        """Return the piece with both times multiplied by a factor."""
        return self._replace(fixed=self.fixed * factor, wire=self.wire * factor)


class Once(NamedTuple):
    """Pieces of the operations on a rank's model states that run once per step, and of the fixed time of a step."""

    reduce: Piece
    gather: Piece
    packing: Piece
    tied: Piece
    update: Piece
    on_host: Piece
    fixed: Piece


class LayoutCosts(NamedTuple):
    """Pieces of one micro-batch on all stages of a rank with the most layers, and of all other parts of a step."""

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    recompute: tuple[Piece, ...]
    weight_s: float
    """Seconds of weight gradients in the backward pass, which a schedule may defer."""
    edge: tuple[Piece, ...]
    """Embedding and output projection in both passes."""
    spare: float
    """Number of layers that the last pipeline rank has fewer than other ranks, as a fraction of the layers of those
    ranks."""
    hop: Piece
    """One message between stages."""
    hop_efficiency: float
    """Bytes of a message between stages, relative to the bytes for which it occupies its link."""
    host_forward_s: float
    host_backward_s: float
    once: Once
    reduces: bool
    """Whether gradients are reduced for every micro-batch; if not, once per step."""

    @classmethod
    def of(
        cls, model: Transformer, layout: Layout, cluster: Cluster, calibration: Calibration
    ) -> LayoutCosts:
        """Return the times of a layout; all but latencies come from the same formulas as its prediction."""
        intra, inter = (each.model_copy(update={"latency_s": 0.0}) for each in (cluster.intra, cluster.inter))
        free = cluster.model_copy(update={"intra": intra, "inter": inter})
        without = calibration.model_copy(update={"collective_s": 0.0})
        whole = _Found.of(model, layout, cluster, calibration)
        wire = _Found.of(model, layout, free, without)
        links = _links(layout, cluster, whole.machine)

        def pieces(name: str, kind: str) -> tuple[Piece, ...]:
            pace = whole.pace if name != "edge" else 1.0
            return _pieces(getattr(whole.stage, name), getattr(wire.stage, name), kind, links, pace)

        far = "inter" if cluster.nodes > 1 and layout.num_devices > cluster.per_node else "intra"
        hops = [
            float(each.rows.micro["far hop" if far == "inter" else "near hop"][0]) for each in (whole, wire)
        ]
        link = cluster.inter if far == "inter" else cluster.intra
        near = calibration.intra_rate(cluster.intra) / cluster.intra.bandwidth
        share = calibration.inter_efficiency if far == "inter" else near
        there, back = (float(np.max(each)) * whole.pace for each in host_seconds(whole.rows))
        assert link.bandwidth > 0
        return cls(
            forward=pieces("forward", FORWARD), backward=pieces("backward", BACKWARD),
            recompute=pieces("recompute", NAMES["recompute"]),
            weight_s=float(whole.stage.backward.weight[0]) * whole.pace, edge=pieces("edge", EDGE),
            spare=float(whole.stage.spare[0]),
            hop=Piece(NAMES["pipeline_comm"], hops[0] - hops[1], hops[1], far),
            hop_efficiency=calibration.pipeline_efficiency / share,
            host_forward_s=there, host_backward_s=back, once=_once(whole, wire, links["data"], calibration),
            reduces=bool(whole.rows.reduces[0]),
        )  # fmt: skip


class _Found(NamedTuple):
    """Times from the formulas for one layout on one cluster."""

    machine: Machine
    stage: SlowestStage
    rows: StepRows
    pace: float

    @classmethod
    def of(cls, model: Transformer, layout: Layout, cluster: Cluster, calibration: Calibration) -> _Found:
        layouts, machine = Layouts.of([layout]), Machine.of(cluster, calibration, layout.precision)
        one = slice(0, 1)
        split = Split.of(
            tensor=np.array([layout.tensor], float), micro_batch=np.array([layout.micro_batch], float),
            context=np.array([layout.context], float), expert=np.array([layout.expert], float),
        )  # fmt: skip
        times = stage(
            model, machine, split, pipeline=np.array([layout.pipeline]),
            recompute=layouts.recompute, most_recomputed=layouts.most_recomputed,
            sequence_parallel=np.array([layout.sequence_parallel]), flash=layout.flash_attention,
        )  # fmt: skip
        if calibration.shapes:
            times = times.slower(np.array([factor_of(calibration.shapes, shape_of(model, layout))]))
        work = step_work(model, layouts, cluster, calibration, None)
        rows = StepRows(
            layouts.zero, work.reduces, layouts.offload, work.micro.take(one), work.states.take(one),
            work.drag[one], columns().splits[layouts.schedule],
        )  # fmt: skip
        pace = float(cut(model, layouts, cluster, calibration).pace[0]) if cluster.groups else 1.0
        return cls(machine, times, rows, pace)


def _pieces(whole: Pass, wire: Pass, kind: str, links: dict[str, str], pace: float) -> tuple[Piece, ...]:
    """Return the pieces of one pass that take any time: computation, waits for launches, and collectives."""
    found = [
        Piece(kind, float(whole.compute[0])),
        Piece(NAMES["overhead"], float(np.ravel(whole.waiting)[0])),
    ]
    for name in COLLECTIVES:
        total, alone = (float(np.ravel(getattr(each, name))[0]) for each in (whole, wire))
        found.append(Piece(NAMES[f"{name}_comm"], total - alone, alone, links[name]))
    return tuple(piece.times(pace) for piece in found if piece.fixed + piece.wire > 0)


def _links(layout: Layout, cluster: Cluster, machine: Machine) -> dict[str, str]:
    """Return the type of link that limits the collectives of each of a layout's axes."""
    groups = {
        "tensor": (layout.tensor, 1), "context": (layout.context, layout.tensor),
        "expert": (layout.expert, layout.tensor), "data": (layout.data * layout.context, layout.tensor),
    }  # fmt: skip
    within = machine.calibration.intra_rate(cluster.intra)
    return {
        axis: "intra"
        if is_inside_node(cluster, *group) or float(machine.link(*group)[0]) >= within
        else "inter"
        for axis, group in groups.items()
    }


def _once(whole: _Found, wire: _Found, link: str, calibration: Calibration) -> Once:
    def message(name: str) -> Piece:
        total, alone = (float(np.ravel(each.rows.states[name])[0]) for each in (whole, wire))
        return Piece(GRADIENTS, total - alone, alone, link)

    states = {
        name: float(np.ravel(whole.rows.states[name])[0]) for name in ("codec_s", "update_s", "products_s")
    }
    on_host = bool(OFFLOADS_OPTIMIZER[whole.rows.offload][0])
    return Once(
        reduce=message("reduce_s"),
        gather=message("gather_s"),
        packing=Piece(GRADIENTS, states["codec_s"]),
        tied=message("tied_s"),
        update=Piece(NAMES["optimizer"], states["products_s" if on_host else "update_s"]),
        on_host=Piece(NAMES["offload"], float(np.ravel(host_update(whole.rows))[0]) if on_host else 0.0),
        fixed=Piece(NAMES["overhead"], calibration.step_s),
    )
