"""Assign layers to ranks, and free the rest of the model on each rank.

Every rank builds the whole model from the same seed, so all ranks compute the same split. Ranks do not communicate,
except that rank 0 broadcasts measured times. Then each rank keeps the parameters of its own stages, and moves all
others to the meta device, where they take no memory. The module keeps its structure, and thus the names of all
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.methods.strategies.pipeline import Pipeline
from shardscope.methods.strategies.pipeline._torch_probe import Autocast, LayerProbe, probe
from shardscope.spec import Job
from shardscope.spec.partition import even_split
from shardscope.training.context import RankContext
from shardscope.training.data import call, map_tensors
from shardscope.training.models.in_order import Layers, layers_in_order
from shardscope.training.results import as_result


@dataclass(frozen=True)
class StagedModel:
    """A model split into stages.

    Attributes:
        stages: The layers of each stage.
        outputs: The output tensors of each stage for one micro-batch, on the meta device: a single tensor, except for
            the last stage, whose outputs are passed to the loss.
        holders: The ranks that hold each parameter, by its name in the whole model; several if it is tied.
        repeated: Names of the parameters that several stages of a rank hold.
    """

    stages: list[Layers]
    outputs: list[list[Tensor]]
    holders: dict[str, list[int]]
    repeated: frozenset[str]

    @property
    def split(self) -> tuple[int, ...]:
        """Number of layers in each stage."""
        return tuple(len(stage) for stage in self.stages)


def cut(model: nn.Module, inputs: Any, autocast: Autocast, job: Job, context: RankContext) -> StagedModel:
    """Split the layers of `model` into stages; must be called by all ranks.

    Args:
        model: The whole model.
        inputs: Inputs of one micro-batch.
        autocast: Function that returns the autocast context of the job's precision.
        job: The job.
        context: Context of the ranks along the pipeline.

    Raises:
        SpecError: The model cannot be split, or not into this number of stages.
    """
    settings = job.strategy
    assert isinstance(settings, Pipeline)
    layers = layers_in_order(model)
    ranks = settings.stage_ranks(context.world_size)
    settings.check_depth(len(layers), context.world_size, of=f"a model of type {type(model).__name__}")
    is_timed = settings.split == "speed" or (settings.split == "time" and context.rank == 0)
    is_stated = _stated_flops(context) is not None
    probes = probe(
        model, layers, inputs, autocast, measure=is_timed and not is_stated, count=is_timed and is_stated
    )
    split = _split(job, layers, probes, len(ranks), context)
    ends = list(accumulate(split))
    stages = [layers[start:end] for start, end in pairwise([0, *ends])]
    held = _holders(model, stages, ranks)
    return StagedModel(
        stages, [probes[end - 1].outputs for end in ends],
        {name: sorted({*by}) for name, by in held.items()},
        frozenset(name for name, by in held.items() if len(by) > len({*by})),
    )  # fmt: skip


def _split(
    job: Job, layers: Layers, probes: Sequence[LayerProbe], num_stages: int, context: RankContext
) -> tuple[int, ...]:
    settings = job.strategy
    assert isinstance(settings, Pipeline)
    if isinstance(settings.split, tuple):
        return settings.split
    if settings.split == "even":
        return even_split(len(layers), num_stages)
    slowness: list[float] = []
    seconds = _on_own_device(probes, context)
    if settings.split == "speed":
        slowness = _by_rank(seconds, context)
    if settings.split != "memory":
        dist.broadcast(seconds, group_src=0, group=context.whole.group)  # so that all replicas are cut alike
    states = [_state_bytes(layer, job) for _, layer in layers]
    saved = [found.stored_bytes for found in probes]
    return settings.cut(job, seconds.tolist(), slowness, states=states, saved=saved)


def _stated_flops(context: RankContext) -> float | None:
    """Return the FLOP/s of this rank's emulated processor; None if it computes as fast as this machine."""
    node = None if context.emulation is None else context.emulation.processor
    return None if node is None else node.flops


def _on_own_device(probes: Sequence[LayerProbe], context: RankContext) -> Tensor:
    """Return the time of each layer on this rank's device, in seconds.

    On an emulated processor with a given speed, the time follows from the layer's FLOPs, as in a prediction: a measured
    time would be this machine's, and depend on what else it does.
    """
    flops = _stated_flops(context)
    values = [found.seconds if flops is None else found.flops / flops for found in probes]
    node = None if context.emulation is None else context.emulation.processor
    return torch.tensor(values, dtype=torch.float64) * (1.0 if node is None else node.slowdown)


def _by_rank(seconds: Tensor, context: RankContext) -> list[float]:
    """Return the time of all layers on each rank, in seconds."""
    whole = torch.zeros(context.world_size, dtype=torch.float64)
    whole[context.rank] = float(seconds.sum())
    dist.all_reduce(whole, dist.ReduceOp.MAX, group=context.whole.group)  # of replicas, the slowest
    return whole.tolist()


def _state_bytes(layer: nn.Module, job: Job) -> float:
    """Return the bytes of a layer's parameters, gradients and optimizer moments."""
    copies = 2 + job.optimizer.states.tensors
    return sum(p.nbytes * (copies if p.requires_grad else 1) for p in layer.parameters())


def _holders(model: nn.Module, stages: Sequence[Layers], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the rank of each stage that holds a parameter, by the parameter's name."""
    held: dict[int, list[int]] = {}
    for stage, rank in zip(stages, ranks, strict=True):
        for key in {id(parameter) for _, layer in stage for parameter in layer.parameters()}:
            held.setdefault(key, []).append(rank)
    return {name: held[id(p)] for name, p in model.named_parameters() if id(p) in held}


def free_unused(model: nn.Module, keep: Sequence[nn.Module]) -> None:
    """Move to the meta device, in place, all parameters and buffers of `model` that no module in `keep` uses."""
    kept = {id(tensor) for module in keep for tensor in (*module.parameters(), *module.buffers())}
    gone: dict[int, Tensor] = {}  # keeps tied tensors tied
    for module in model.modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            if id(tensor) not in kept:
                setattr(module, name, gone.setdefault(id(tensor), _on_meta(tensor)))


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class StageModule(nn.Module):
    """The layers of one stage in sequence, in the job's precision."""

    def __init__(self, layers: Layers, autocast: Autocast) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for _, layer in layers)
        self.autocast = autocast

    def forward(self, x: Any) -> Any:
        """Apply all layers to the input of the stage: a tensor, or in the first stage, the model's inputs."""
        x = map_tensors(as_result, x)  # the first layer may change it in place
        with self.autocast():
            for layer in self.layers:
                x = call(layer, x)
        return x
