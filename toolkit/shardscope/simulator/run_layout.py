"""Simulation of one step of a layout: which replicas are simulated, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.calibration.choice import calibration_of
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.prediction.step.term import NAMES
from shardscope.simulator.breakdown import busy_seconds, lane_seconds, term_tree
from shardscope.simulator.costs import BACKWARD, EDGE, FORWARD
from shardscope.simulator.of_layout import LayoutStep, schedule_of
from shardscope.simulator.replicas import Variation, replicate
from shardscope.simulator.result import Simulation
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.look import Arrangement
from shardscope.spec.model import Transformer
from shardscope.spec.units import work_text

MOST_LAYERED = 400_000
"""Largest number of operations of a replica that is simulated layer by layer."""
MOST_OPS = 3_000_000
"""Largest number of operations of all replicas; fewer replicas are simulated if there would be more."""
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
    """Return the replicas to simulate: one if all are alike, those with slow ranks and another, or as many as fit."""
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
    """Return the ranks of each lane, with those of replicas that were not simulated in the lanes of the last one."""
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
    """Return sentences that say what was simulated as one."""
    layout, found = step.layout, []
    width = layout.tensor * layout.context
    if width > 1:
        found.append(f"The {width} ranks of a tensor and context parallel group are one lane.")
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
