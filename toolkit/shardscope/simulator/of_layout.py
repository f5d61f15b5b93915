"""One training step of a layout as a graph: passes of micro-batches, messages between stages, gradients, update.

A lane is one pipeline rank of one replica; the ranks of its tensor and context parallel groups do the same at the same
time. Collectives occupy the lane's link inside its node or its link to other nodes, whichever limits them. As in the
prediction, computation can hide the fraction of ZeRO's collectives that the calibration gives; a collective that
overlaps with others on the same link slows them down. `simulate_layout` chooses the replicas to simulate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardscope.analytic.recomputation import layers_of_stage, recomputed_layers
from shardscope.analytic.schedules import ScheduledOp, ScheduleTable, build
from shardscope.analytic.schedules.build import most_microbatches
from shardscope.analytic.schedules.transfers import add_schedule, micro_batch_label
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.choice import calibration_of
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.errors import SpecError
from shardscope.prediction.step.term import NAMES
from shardscope.simulator.breakdown import busy_seconds, lane_seconds, term_tree
from shardscope.simulator.costs import BACKWARD, EDGE, FORWARD, LayoutCosts, Piece
from shardscope.simulator.graph import JOIN, Graph
from shardscope.simulator.replicas import Variation, replicate
from shardscope.simulator.result import Simulation
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.look import Arrangement
from shardscope.spec.model import Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.units import work_text

FORWARD_OF_EDGE = 1 / 3
"""Share of the time of embedding and output projection that the forward pass takes: one of three matrix products."""


@dataclass
class LayoutStep:
    """Builds the graph of one replica's step.

    Attributes:
        model: The model.
        layout: The layout.
        cluster: The cluster.
        calibration: The cluster's constants.
        in_layers: Whether each layer is a sequence of operations of its own; otherwise, the layers of a pass on one
            stage are merged.
        graph: Result: the graph, with one lane for each rank of the pipeline.
        meetings: Result: operations that the ranks of all replicas must reach before any rank continues.
    """

    model: Transformer
    layout: Layout
    cluster: Cluster
    calibration: Calibration
    in_layers: bool = True
    meetings: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, cal, cluster = self.layout, self.calibration, self.cluster
        self.costs = LayoutCosts.of(self.model, layout, cluster, cal)
        self.table = schedule_of(layout)
        self.stages_each = self.table.num_stages // layout.pipeline
        self.layers = layers_of_stage(self.model.layers, self.table.num_stages)
        self.recomputed = int(recomputed_layers(self.layers, layout.recompute_layers))
        self.graph = Graph([f"stage {rank}" for rank in range(layout.pipeline)])
        self.links = [
            {
                "intra": self.graph.link(f"{lane}, inside the node", cal.intra_rate(cluster.intra)),
                "inter": self.graph.link(f"{lane}, to other nodes", cluster.inter.bandwidth * cal.inter_efficiency),
            }
            for lane in self.graph.lanes
        ]  # fmt: skip
        self._build()

    def _build(self) -> None:
        ranks = range(self.layout.pipeline)
        prefetched = [self._prefetched(rank) for rank in ranks]
        entry = [self.graph.add(rank) for rank in ranks]
        self.reducing = [-1] * len(self.graph.lanes)
        exits = add_schedule(self.table, entry, self._pass, self._message)
        ends = [self._reduced(rank, exits.ranks[rank], prefetched[rank]) for rank in ranks]
        if self.costs.once.tied.fixed + self.costs.once.tied.wire > 0 and not self._is_v_shaped:
            both = self.graph.add(0, JOIN, after=(ends[0], ends[-1]))
            for rank in (0, len(ends) - 1):
                ends[rank] = self._piece(rank, self.costs.once.tied, [both], label="tied embedding")
        for rank in ranks:
            self._updated(rank, ends[rank])

    @property
    def _is_v_shaped(self) -> bool:
        return self.table.stage_ranks[0] == self.table.stage_ranks[-1] and self.layout.pipeline > 1

    def _piece(
        self, rank: int, piece: Piece, after: Iterable[int], *, label: str = "", serial: bool = True, share: float = 1.0
    ) -> int:  # fmt: skip
        link = self.links[rank].get(piece.link)
        size = 0.0 if link is None else piece.wire * share * self.graph.capacity[link]
        return self.graph.add(
            rank, piece.kind, piece.fixed * share, size=size, links=() if link is None else (link,), after=after,
            serial=serial, label=label,
        )  # fmt: skip

    def _chain(
        self, rank: int, layers: Iterable[Sequence[Piece]], after: list[int], label: str
    ) -> list[int]:  # fmt: skip
        """Add the pieces of all layers one after another, and return the last operation of each layer."""
        ends = []
        for pieces in layers:
            for piece in pieces:
                after = [self._piece(rank, piece, after, label=label)]
            ends.append(after[-1] if len(after) == 1 else self.graph.add(rank, after=after))
            after = [ends[-1]]
        return ends

    def _pass(self, op: ScheduledOp, after: list[int], is_last: bool) -> int:
        rank, graph = self.table.stage_ranks[op.stage], self.graph
        label = micro_batch_label(op, self.table)
        begin = after[0] if len(after) == 1 else graph.add(rank, after=after)
        share = self._share(rank)
        hidden = self._collectives(op)
        overlap = self.calibration.shard_overlap
        after = [begin]
        for piece in hidden:
            after = [self._piece(rank, piece, after, share=(1 - overlap) * share, label=label)]
        others = [
            self._piece(rank, piece, after, share=overlap * share, label=label, serial=False)
            for piece in hidden
            if overlap
        ]
        is_reducing = is_last and not self.costs.reduces and self.calibration.gradient_overlap > 0
        layers = self.layers if self.in_layers or is_reducing else 1
        ends = self._chain(rank, self._by_layer(op, share, layers), after, label)
        if op.stage == self.table.num_stages - 1 and op.op != "W":
            part = FORWARD_OF_EDGE if op.op == "F" else 1 - FORWARD_OF_EDGE
            for piece in self.costs.edge:
                ends.append(self._piece(rank, piece, [ends[-1]], label=EDGE, share=part))
        if is_reducing:
            self._buckets(rank, ends[:layers])
        host = self.costs.host_forward_s if op.op == "F" else self.costs.host_backward_s * (op.op != "W")
        if host:
            others.append(
                graph.add(
                    rank, NAMES["offload"], host / self.stages_each, after=[begin], serial=False, label=label
                )
            )
        return graph.add(rank, after=[ends[-1], *others]) if others else ends[-1]

    def _share(self, rank: int) -> float:
        """Return the work of one stage of this rank, as a fraction of the work of the rank with the most layers."""
        spare = self.costs.spare if rank == self.layout.pipeline - 1 else 0.0
        return (1.0 - spare) / self.stages_each

    def _by_layer(self, op: ScheduledOp, share: float, layers: int) -> list[list[Piece]]:
        """Return the pieces of a pass on one stage, by layer in execution order; recomputed layers come last.

        Args:
            op: The pass.
            share: Result of `_share`.
            layers: Number of layers; 1 to merge them.
        """
        whole = [piece.times(share / layers) for piece in self._pieces(op)]
        count = self.recomputed if layers > 1 else 1
        again = [] if op.op in "FW" else [piece.times(share / count) for piece in self.costs.recompute]
        return [whole] * (layers - count) + [[*again, *whole]] * count

    def _pieces(self, op: ScheduledOp) -> list[Piece]:
        """Return the pieces of a pass on all stages of a rank, without recomputation."""
        costs = self.costs
        if op.op == "F":
            return list(costs.forward)
        first, *rest = costs.backward
        weight = first._replace(fixed=costs.weight_s)
        if op.op == "W":
            return [weight]
        inputs = first._replace(fixed=first.fixed - (costs.weight_s if op.op == "I" else 0.0))
        return [inputs, *rest]

    def _collectives(self, op: ScheduledOp) -> list[Piece]:
        """Return ZeRO's collectives during a pass on all stages of a rank, which computation can partly hide."""
        once, zero = self.costs.once, self.layout.zero
        found = [once.gather] * (zero == 3 and op.op != "W") + [once.reduce] * (
            self.costs.reduces and op.op in "BW"
        )
        return [piece for piece in found if piece.fixed + piece.wire > 0]

    def _message(self, op: ScheduledOp, after: list[int], target: int) -> int:
        rank, hop = self.table.stage_ranks[op.stage], self.costs.hop
        link = self.links[rank][hop.link]
        size = hop.wire * self.graph.capacity[link]
        return self.graph.add(
            rank, hop.kind, hop.fixed, size=size, links=(link,), payload=size * self.costs.hop_efficiency, after=after,
            serial=False, peer=target, label=micro_batch_label(op, self.table),
        )  # fmt: skip

    def _meet(self, rank: int, after: Iterable[int]) -> int:
        meeting = self.graph.add(rank, JOIN, after=after)
        self.meetings.append(meeting)
        return meeting

    def _prefetched(self, rank: int) -> int:
        """Add the part of the last step's all-gather of parameters that this step's computation hides; -1 for none."""
        if self.layout.zero not in (1, 2) or not self.calibration.gradient_overlap:
            return -1
        share = self.calibration.gradient_overlap
        return self._piece(rank, self.costs.once.gather, [], share=share, serial=False, label="parameters")

    def _buckets(self, rank: int, ends: Sequence[int]) -> None:
        """Add the part of the gradient reduction that the last backward pass hides, layer by layer."""
        share = self.calibration.gradient_overlap / len(ends) / self.stages_each
        for end in ends:
            ready = self._meet(rank, [end, self.reducing[rank]])
            piece = self.costs.once.reduce
            self.reducing[rank] = self._piece(
                rank, piece, [ready], share=share, serial=False, label="gradients"
            )

    def _reduced(self, rank: int, end: int, prefetched: int) -> int:
        """Add the exposed part of the gradient reduction, and return the operation that ends it."""
        if self.costs.reduces:
            return self._meet(rank, [end, prefetched])
        once = self.costs.once
        packed = self._piece(rank, once.packing, [end], label="gradients") if once.packing.fixed else end
        ready = self._meet(rank, [packed, self.reducing[rank], prefetched])
        share = 1.0 - self.calibration.gradient_overlap
        if not share or once.reduce.fixed + once.reduce.wire == 0:
            return ready
        return self._piece(rank, once.reduce, [ready], share=share, label="gradients")

    def _updated(self, rank: int, end: int) -> None:
        """Add the update, the exposed part of the all-gather of parameters, and the fixed cost of a step."""
        once, share = self.costs.once, 1.0 - self.calibration.gradient_overlap
        for piece in (once.update, once.on_host):
            if piece.fixed:
                end = self._piece(rank, piece, [end], label="update")
        if self.layout.zero in (1, 2) and share and once.gather.fixed + once.gather.wire > 0:
            end = self._piece(rank, once.gather, [self._meet(rank, [end])], share=share, label="parameters")
        self._piece(rank, once.fixed, [end])


def schedule_of(layout: Layout) -> ScheduleTable:
    """Return the table of a layout's schedule; without a pipeline, forward and backward passes alternate.

    Raises:
        SpecError: The table would be too large.
    """
    schedule = PipelineSchedule(layout.schedule if layout.pipeline > 1 else "1f1b")
    held = schedule.stages_of(layout.virtual_stages)
    most = most_microbatches(schedule, layout.pipeline, held)
    if layout.num_micro_batches > most:
        advice = f"use a global_batch of at most {most * layout.data * layout.micro_batch}, or a larger micro_batch"
        raise SpecError(
            f"global_batch={layout.global_batch} with data={layout.data} and micro_batch={layout.micro_batch} is "
            f"{layout.num_micro_batches} micro-batches a step, too many to simulate with pipeline={layout.pipeline}; "
            f"{advice if most else 'use a smaller pipeline'}"
        )
    return build(schedule, layout.pipeline, layout.num_micro_batches, held)


MOST_LAYERED = 400_000
"""Maximum number of operations of a replica that is simulated layer by layer."""
MOST_OPS = 3_000_000
"""Maximum number of operations of all replicas; fewer replicas are simulated if they would exceed it."""
_PER_LAYER = 8
_PARENTS = {FORWARD: "compute", BACKWARD: "compute", EDGE: "compute"}
_ORDER = tuple(NAMES.values())


def simulate_layout(
    model: Transformer,
    cluster: Cluster,
    layout: Layout,
    calibration: AnyCalibration | None,
    variation: Variation,
    *,
    software: str | None = None,
) -> Simulation:
    """Simulate one step of a layout; see `shardscope.simulate`.

    Raises:
        SpecError: The layout does not use exactly the cluster's devices, the model or batch cannot be divided as the
            layout specifies, or the variation names ranks that do not exist.
    """
    layout.check(model, cluster)
    variation.check(layout.num_devices)
    known = calibration_of(cluster, calibration, software=software, layout=layout)
    passes = len(schedule_of(layout).ops)
    in_layers = passes * _PER_LAYER * model.layers // schedule_of(layout).num_stages <= MOST_LAYERED
    step = LayoutStep(model, layout, cluster, known, in_layers=in_layers)
    copies = _copies(layout, variation, step.graph.num_ops)
    ranks = [
        lane
        for k, copy in enumerate(copies)
        for lane in _lane_ranks(layout, [copy] if k or len(copies) > 1 else range(layout.data))
    ]
    done = replicate(step.graph, copies, step.meetings, ranks, variation)
    lane = int(busy_seconds(done).argmax())
    seconds = lane_seconds(done, lane, NAMES["bubble"])
    every = _all_ranks(ranks, layout, copies)
    return Simulation(
        label=f"{model.name or 'transformer'}, {_degrees(layout)}",
        num_devices=layout.num_devices,
        time=term_tree(seconds, _PARENTS, _ORDER),
        merged=tuple(_merged(step, copies, in_layers, cluster, variation)),
        lane_ranks=tuple(map(tuple, every)),
        done=done,
        arrangement=Arrangement("row" if layout.pipeline > 1 else "ring"),
        work=work_text(layout.global_batch, model.seq),
    )


def _copies(layout: Layout, variation: Variation, num_ops: int) -> list[int]:
    """Return the replicas to simulate: one if all are equal, else the slow ones and some others, up to `MOST_OPS`."""
    if variation.is_none or layout.data == 1:
        return [0]
    most = max(2, MOST_OPS // num_ops)
    width = layout.tensor * layout.context
    slow = sorted({rank // width % layout.data for rank in variation.stragglers})
    others = [copy for copy in range(layout.data) if copy not in slow]
    wanted = [*slow, *(others if variation.jitter else others[:1])]
    return wanted[:most]


def _lane_ranks(layout: Layout, copies: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each pipeline rank of some replicas; ranks count along tensor, context, data, pipeline."""
    width = layout.tensor * layout.context
    return [
        [width * (copy + layout.data * stage) + k for copy in copies for k in range(width)]
        for stage in range(layout.pipeline)
    ]


def _all_ranks(ranks: list[list[int]], layout: Layout, copies: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each lane; the lanes of the last replica include the ranks of replicas not simulated."""
    missing = [copy for copy in range(layout.data) if copy not in copies]
    if len(copies) == 1 or not missing:
        return ranks
    extra = _lane_ranks(layout, missing)
    first = len(ranks) - layout.pipeline
    return [*ranks[:first], *(own + more for own, more in zip(ranks[first:], extra, strict=True))]


def _degrees(layout: Layout) -> str:
    names = ("data", "tensor", "pipeline", "context", "expert")
    degrees = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    return " x ".join(degrees) or "one device"


def _merged(
    step: LayoutStep, copies: Sequence[int], in_layers: bool, cluster: Cluster, variation: Variation
) -> list[str]:
    """Return sentences on the parts that were merged in the simulation."""
    layout, found = step.layout, []
    width = layout.tensor * layout.context
    if width > 1:
        found.append(f"The {width} ranks of a tensor and context parallel group are drawn as one lane.")
    if layout.data > len(copies):
        what = "Of" if len(copies) > 1 else "All"
        same = (
            f"{len(copies)} are simulated; the others are like the last of them"
            if len(copies) > 1
            else "are one"
        )
        found.append(f"{what} {layout.data} replicas{',' if len(copies) > 1 else ''} {same}.")
    if not in_layers:
        found.append("The layers of a stage are one operation per pass, except in the last backward pass.")
    found.append("All rounds of a collective are one message on the link that limits it.")
    if cluster.groups:
        found.append("All stages take as long as the slowest one of the mixed cluster.")
    if variation.jitter and width > 1:
        found.append(f"Each computation of a lane takes as long as the slowest of its {width} ranks.")
    return found
