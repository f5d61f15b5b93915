"""The expert axis of a mesh: what it refuses, its all-to-alls, and the ranks that exchange gradients of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardscope.errors import SpecError, quoted
from shardscope.methods.strategies.mesh.messages import ROUNDS, messages_of, norms
from shardscope.runlog.axes import EXPERT_DATA
from shardscope.spec.divisors import divisors_text
from shardscope.spec.models import MODELS, GPTConfig, transformer_of
from shardscope.spec.strategy import Strategy, Work

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import Exchange, When
    from shardscope.analytic.communication.ring import Ints
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.schedules.stage_passes import StagePass
    from shardscope.methods.strategies.mesh import Mesh
    from shardscope.spec.job import Job
    from shardscope.spec.model.step import AxisMessage, PipelinePiece, StepTrace


def check(mesh: Mesh, job: Job) -> None:
    """Reject a model without experts, and what is not available yet with experts on different ranks."""
    ranks, of = mesh.num_state_ranks(job.world_size), "data" if mesh.context == 1 else "data and context"
    if ranks % mesh.expert:
        raise SpecError(
            f"strategy.expert={mesh.expert} does not divide the {ranks} {of} ranks, over which it distributes experts; "
            f"use one of {divisors_text(ranks, near=mesh.expert)}"
        )
    for name in ("shards", "replicas", "offload", "collectives"):
        field, value = type(mesh.data).model_fields.get(name), getattr(mesh.data, name, None)
        if field is not None and value != field.default:
            raise SpecError(
                f"strategy.data.{name}={value!r} is not available with strategy.expert={mesh.expert} yet; leave "
                f"{name} out"
            )
    for name, value in (("optimizer", job.optimizer.user_code), ("compression", job.compression.is_on)):
        if value:
            raise SpecError(
                f"{name}={quoted(getattr(job, name).name)} is not available with strategy.expert={mesh.expert} yet; "
                + ("use a built-in one" if name == "optimizer" else "use compression='none'")
            )
    _check_model(mesh, job)


def _check_model(mesh: Mesh, job: Job) -> None:
    if not isinstance(job.model, str):
        return  # ranks check it when they divide the model
    transformer = transformer_of(job.model)
    if transformer is None or transformer.mixture is None:
        able = ", ".join(
            repr(name) for name, each in MODELS.items() if isinstance(each, GPTConfig) and each.mixture
        )
        raise SpecError(
            f"model={job.model!r} has no experts to distribute over strategy.expert={mesh.expert} ranks; use one of "
            f"{able}, or expert=1"
        )
    experts = transformer.mixture.experts
    if experts % mesh.expert:
        raise SpecError(
            f"strategy.expert={mesh.expert} does not divide the {experts} experts of model={job.model!r}; use one of "
            f"{divisors_text(experts, near=mesh.expert)}"
        )


def shape(mesh: Mesh, world_size: int) -> dict[str, int]:
    """Return the number of ranks with other layers, that of data ranks that hold the same experts, that of ranks with
    different ones, and that of ranks among which each is divided.
    """
    holders = mesh.num_state_ranks(world_size) // mesh.expert
    return {"pipeline": mesh.pipeline, EXPERT_DATA: holders, "expert": mesh.expert, "tensor": mesh.tensor}


def holders_job(mesh: Mesh, job: Job) -> Job:
    """Return the job of the ranks that hold the same experts, which average the gradients of these."""
    own, ranks = mesh.data_job(job), shape(mesh, job.world_size)[EXPERT_DATA]
    return own.replace(
        strategy=own.strategy if ranks > 1 else Strategy("single"), world_size=ranks,
        batch=own.batch.replace(global_batch=own.batch.per_rank(own.world_size) * ranks),
    )  # fmt: skip


def exchanging(mesh: Mesh, job: Job, data: JobStep) -> dict[str, JobStep]:
    """Return the steps of the data ranks without experts, and of the ranks that hold the same experts, by axis.

    Args:
        mesh: The mesh.
        job: The job of all ranks.
        data: The step of the data ranks, with all of a rank's parameters.
    """
    from shardscope.analytic.expert_trace import part_of

    if not any(row.is_expert for row in data.trace.parameters):  # of a stage without experts
        return {"data": replace(data, normed=tuple(data.trained))}
    experts = replace(
        data, job=holders_job(mesh, job), trace=_of_experts(data.trace), follows_passes=True, passes=_passes(data),
        slowness=(), update_slowness=(), memory=(), normed=(),
    )  # fmt: skip
    dense = replace(data, trace=part_of(data.trace, of_experts=False), normed=tuple(data.trained))
    return {"data": dense, EXPERT_DATA: experts}


def _of_experts(trace: StepTrace) -> StepTrace:
    """Return a trace with the parameters of experts only, of which each linear layer is a unit."""
    from shardscope.analytic.expert_trace import layer_numbers, part_of

    part = part_of(trace, of_experts=True)
    numbers = layer_numbers(part.parameters)
    rows = tuple(row.replace(unit=unit) for row, unit in zip(part.parameters, numbers, strict=True))
    return part.replace(
        parameters=rows,
        units=("",) * (numbers[-1] + 1),
        moments={},
        pieces=(),
        buffer_sizes=(),
        buffer_bytes=0,
    )


def _passes(data: JobStep) -> tuple[tuple[StagePass, ...], ...]:
    """Return the passes of each unit of `_of_experts`: those of the block around it."""
    from shardscope.analytic.expert_trace import layer_numbers, part_of

    rows = part_of(data.trace, of_experts=True).parameters
    around = {unit: row.unit for row, unit in zip(rows, layer_numbers(rows), strict=True)}
    return tuple(data.passes[around[unit]] for unit in sorted(around)) if data.passes else ()


def after_passes(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Return the exchanges of the gradients of experts, moved to after the last pass; those of the optimizer stay."""
    from shardscope.analytic.communication.plan import When

    end = When("optimizer", 0.0)
    return [each if each.when.phase == "optimizer" else replace(each, when=end) for each in exchanges]


class ExpertLayers(NamedTuple):
    """Layers with experts, as traced with an even load; all have the same sizes."""

    num_layers: int
    experts: int
    hidden: int
    choices: float
    """Choices of a sample's tokens."""
    element_bytes: int
    output_bytes: int

    @classmethod
    def of(cls, messages: Sequence[AxisMessage], mesh: Mesh, step: JobStep) -> ExpertLayers:
        """Return the layers that call these all-to-alls in one micro-batch."""
        forward = [each for each in messages if each.phase == "forward"]
        count, (_, tokens, outputs) = len(forward) // _FORWARD, forward[:_FORWARD]
        local, *_, hidden = next(row.shape for row in step.trace.parameters if row.is_expert)
        width = step.element_bytes  # of the tokens, which a norm computes from the weights' precision
        return cls(
            count, local * mesh.expert, hidden, tokens.sample_bytes / (hidden * width), width,
            round(width * outputs.sample_bytes / tokens.sample_bytes),
        )  # fmt: skip

    def loads(self, step: JobStep, ranks: int) -> list[Ints]:
        """Return the load of each layer in a micro-batch, by rank and expert; ranks have tokens of the same kinds."""
        import numpy as np

        if step.expert_loads:
            rows = np.rint(np.array(step.expert_loads) * self.choices * step.samples).astype(np.int64)
            return [np.tile(row, (ranks, 1)) for row in rows]
        size, rest = divmod(round(self.choices * step.samples), self.experts)
        return [np.tile(size + (np.arange(self.experts) < rest), (ranks, 1))] * self.num_layers


_FORWARD = 3
"""Number of all-to-alls of a layer in a forward pass; see `AllToAlls`."""
_FOLLOWING = {0: 1, 1: 2, 3: 4}
"""Places in `AllToAlls` that follow others in the same layer and pass."""


class _Call(NamedTuple):
    """One all-to-all of an expert group."""

    when: When
    num_bytes: Ints
    """Bytes by sender and receiver."""
    largest: int | None
    """Most bytes that a rank can send; None if the bytes do not depend on the load."""


def _all_to_alls(mesh: Mesh, step: JobStep) -> Iterator[_Call]:
    """Yield the all-to-alls of an expert group in a step, in the order of the calls."""
    import numpy as np

    from shardscope.analytic.communication.experts import all_to_alls
    from shardscope.analytic.communication.plan import When
    from shardscope.analytic.schedules.stage_passes import PHASES

    layers, ranks = layers_of(mesh, step), mesh.expert
    if layers is None:
        return
    loads = layers.loads(step, ranks)
    sizes = {name: getattr(layers, name) for name in ("hidden", "element_bytes", "output_bytes")}
    to_first = np.zeros_like(loads[0])  # all tokens go to the first rank, except its own
    to_first[1:, 0] = to_first[0, -1] = round(layers.choices * step.samples)
    found, most = [all_to_alls(each, **sizes) for each in loads], all_to_alls(to_first, **sizes)
    for micro_batch in range(step.micro_batches):
        messages = [each for each in messages_of(step, micro_batch) if each.axis == "expert"]
        for phase in PHASES:
            kinds = [*_kinds([each for each in messages if each.phase == phase])]
            for number, (place, kind) in enumerate(kinds, 1):
                layer = place if phase == "forward" else layers.num_layers - 1 - place
                when = When(phase, number / (len(kinds) + 1), micro_batch)
                yield _Call(when, found[layer][kind], None if kind == 0 else int(most[kind].sum(1).max()))


def calls(mesh: Mesh, step: JobStep) -> list[tuple[When, Traffic]]:
    """Return the traffic of each collective of an expert group in a step.

    The bytes of all-to-alls are bounded by those of ranks of which one gets all tokens and keeps none.
    """
    import numpy as np

    from shardscope.analytic.communication.plan import When
    from shardscope.analytic.communication.traffic import Sent

    found: list[tuple[When, Traffic]] = []
    for when, num_bytes, largest in _all_to_alls(mesh, step):
        sent, received = num_bytes.sum(1), num_bytes.sum(0)
        bounds = None if largest is None else (np.zeros_like(sent), np.full_like(sent, largest))
        rounds = np.full_like(sent, ROUNDS["all_to_all"] * (mesh.expert - 1))
        uneven = None if (sent == received).all() else received
        found.append((when, {"all_to_all": Sent(sent, 0 * sent, bounds, uneven, assumed_messages=rounds)}))
    return [*found, *((When("optimizer", 0.0), traffic) for traffic in _norms(mesh, step))]


def exchanges(mesh: Mesh, step: JobStep) -> list[Exchange]:
    """Return the messages of an expert group in a step: each rank sends to all others at once; passes wait for them."""
    from shardscope.analytic.communication.plan import Exchange, Move, Round, When, whole

    found = []
    for when, num_bytes, _ in _all_to_alls(mesh, step):
        moves = tuple(
            Move(source, target, size)
            for source, row in enumerate(num_bytes.tolist())
            for target, size in enumerate(row)
            if size
        )
        found.append(Exchange("all_to_all", when, rounds=(Round("exchange", moves),), blocks=True))
    sums = [each for traffic in _norms(mesh, step) for each in whole(traffic, When("optimizer", 0.0))]
    return [*found, *(replace(each, blocks=True) for each in sums)]


def _norms(mesh: Mesh, step: JobStep) -> Iterator[Traffic]:
    """Yield the traffic of sums of norms; with ZeRO, they are sums over the data ranks, whose shards are of all
    experts.
    """
    return iter(()) if mesh.data.zero_stage else norms(step, mesh.expert)


def uneven_work(mesh: Mesh, step: JobStep, work: Sequence[Work]) -> list[Work]:
    """Return the work of each rank with the loads of its experts, given that with an even load.

    A rank computes for the tokens that all ranks of its group send to its experts. In each layer, all ranks wait for
    the one with the most tokens: what the busiest rank of the step waits for others in its other layers counts as work.
    """
    layers, ranks = layers_of(mesh, step), mesh.expert
    assert layers is not None
    of_layers = _shares_of_ranks(mesh, step)
    shares = of_layers.mean(0)
    shares += of_layers.max(1).mean() - shares.max()
    extra = (ranks * shares - 1) * _even_flops(layers, step) * layers.num_layers / step.flops
    place = {rank: at for group in mesh.groups("expert", step.world_size) for at, rank in enumerate(group)}
    return [
        each._replace(computing=each.computing * (1 + float(extra[place[rank]])))
        for rank, each in enumerate(work)
    ]


def extra_flops(mesh: Mesh, step: JobStep) -> tuple[float, ...]:
    """Return the FLOPs of each pipeline layer's forward pass for one sample, on the rank whose experts get the most
    tokens, in addition to those with an even load.

    All ranks of a stage wait for that rank in the layer's all-to-alls.
    """
    layers = layers_of(mesh, step)
    assert layers is not None
    fullest = iter(_shares_of_ranks(mesh, step).max(1).tolist())
    even = _even_flops(layers, step)
    return tuple(
        even * sum(mesh.expert * next(fullest) - 1 for _ in range(num_layers(piece, step.job.recompute)))
        for piece in step.trace.pieces
    )


def _shares_of_ranks(mesh: Mesh, step: JobStep) -> npt.NDArray[np.float64]:
    """Return the share of all choices that the experts of each rank get; shape `(layers, ranks)`."""
    import numpy as np

    loads = np.array(step.expert_loads)
    shares: npt.NDArray[np.float64] = loads.reshape(len(loads), mesh.expert, -1).sum(2)
    return shares


def _even_flops(layers: ExpertLayers, step: JobStep) -> float:
    """Return the FLOPs of the experts of a layer on one rank for one sample, with an even load: a product with each
    matrix of an expert for each choice.
    """
    rows = [row.shape for row in step.trace.parameters if row.is_expert and len(row.shape) == 3]
    return layers.choices * sum(2 * shape[-2] * shape[-1] for shape in rows) / layers.num_layers


def num_layers(piece: PipelinePiece, recompute: str) -> int:
    """Return the number of layers with experts in a layer of a pipeline."""
    messages = piece.messages.get(recompute, ())
    return sum(each.axis == "expert" and each.phase == "forward" for each in messages) // _FORWARD


def layers_of(mesh: Mesh, step: JobStep) -> ExpertLayers | None:
    """Return the layers with experts of a step; None for a stage without any."""
    messages = [each for each in messages_of(step, 0) if each.axis == "expert"]
    return ExpertLayers.of(messages, mesh, step) if messages else None


def _kinds(messages: Sequence[AxisMessage]) -> Iterator[tuple[int, int]]:
    """Yield the layer, and the place in `AllToAlls`, of each all-to-all of a pass; the pass's first layer is layer 0.

    A backward pass may repeat the forward pass of each layer, and one for weights may do no more.
    """
    layer, kind = -1, -1
    for each in messages:
        before, kind = kind, 0 if each.fixed_bytes else _FOLLOWING.get(kind, _FORWARD)
        layer += kind == 0 or (kind == _FORWARD and before != _FORWARD - 1)
        yield layer, kind
