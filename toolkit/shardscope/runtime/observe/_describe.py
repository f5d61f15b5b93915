"""Describe an observed training loop as a job, as soon as its first step has ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardscope.errors import SpecError
from shardscope.runtime.observe._axes import is_hybrid, tensor_axis
from shardscope.runtime.observe._optimizers import Optimizers, rate_of
from shardscope.spec import Optimizer, Record, Strategy
from shardscope.spec.job_parts import UserCode
from shardscope.spec.model.step import ParameterRow
from shardscope.spec.observed import ObservedJob, ShardedUnit, Wrapper
from shardscope.training._compat import FsdpUnit, fsdp_units

DATA = "data of a training script"
"""Name for the data of an observed run, about which nothing is known."""


@dataclass
class Seen:
    """Observations of a training loop so far.

    Attributes:
        model: The model, as passed by the user.
        optimizer: The observed optimizer; None if it is not known yet.
        name: Name of the run.
        record: What the run records.
        world_size: Number of ranks.
        ddp: The `DistributedDataParallel` around the model; None if there is none.
        samples: Number of samples of this rank in its first step; 0 until the step has ended.
        passes: Number of forward passes of this rank in its first step.
        exchanges: Number of backward passes in the first step after which gradients are exchanged.
        steps: Number of steps that have ended.
        optimizers: All optimizers that update the model.
        syncs: Whether DDP exchanges gradients in the next backward pass, as decided in its last forward pass.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    name: str | None
    record: Record
    world_size: int
    ddp: DistributedDataParallel | None = None
    samples: int = 0
    passes: int = 0
    exchanges: int = 0
    steps: int = 0
    syncs: bool = True
    optimizers: Optimizers = field(init=False)

    def __post_init__(self) -> None:
        self.optimizers = Optimizers(self.model, self.optimizer)

    def see_forward(self) -> None:
        """Record which wrapper has called the model."""
        active = DistributedDataParallel._get_active_ddp_module()  # noqa: SLF001 - None outside its forward pass
        called = self.model if isinstance(self.model, DistributedDataParallel) else active
        if called is not None:
            self.ddp, self.syncs = called, called.require_backward_grad_sync

    def see_backward(self) -> None:
        """Record whether gradients are exchanged after this backward pass."""
        units = fsdp_units(self.model)
        exchanges = units[0].exchanges if units else True
        self.exchanges += bool(exchanges if self.ddp is None else self.syncs)

    @property
    def wrapper(self) -> Wrapper:
        """The torch wrapper that divides the work among the ranks; ``mesh`` if they form several axes."""
        if is_hybrid(self.model, self.world_size):
            return "mesh"
        if self.ddp is not None or isinstance(self.model, DistributedDataParallel):
            return "DDP"
        if fsdp_units(self.model):
            return "FSDP2"
        names = {type(module).__name__ for module in self.model.modules()}
        return "FSDP1" if "FullyShardedDataParallel" in names else "none"

    @property
    def label(self) -> str:
        """Label of the run's strategy, such as ``observed (DDP)``."""
        return "observed" if self.wrapper == "none" else f"observed ({self.wrapper})"

    def job(self) -> ObservedJob:
        """Return a job that describes the training loop as observed so far."""
        replicas = self.world_size // tensor_axis(self.model)[0]
        batch = {"global_batch": self.samples * replicas} if self.samples else None
        first = {"forwards": self.passes, "exchanges": self.exchanges} if self.passes else {}
        return ObservedJob(
            model=UserCode(name=_class_of(self.model)), data=UserCode(name=DATA), name=self.name,
            strategy=Strategy.from_fields({"name": self.label, "observed": self.wrapper}),
            world_size=self.world_size, optimizer=_optimizer(self.optimizer), record=self.record,
            wrapper=self.wrapper, **({"batch": batch} if batch else {}), **first,
            **({"steps": self.steps} if self.steps else {}), **self._tensors(),
        )  # fmt: skip

    def _tensors(self) -> dict[str, Any]:
        """Return the fields of `ObservedJob` about the model's tensors and the ranks that exchange them."""
        units = fsdp_units(self.model)
        parameters = known_parameters(self.model)
        rows = _sharded_rows(parameters, units) if units else [_row(0, each) for each in parameters]
        widths = {each.element_size() for each in parameters}
        sent = self.ddp.modules_buffers if self.ddp is not None and self.ddp.broadcast_buffers else ()
        return {
            "backend": dist.get_backend() if dist.is_available() and dist.is_initialized() else "none",
            "parameters": rows,
            "units": [_unit(each) for each in units],
            "weight_bytes": widths.pop() if len(widths) == 1 else 0,
            "gradient_bytes": _bytes(each for each in parameters if each.requires_grad),
            "stateful": _stateful(self.optimizer, parameters),
            "num_optimizers": max(1, self.optimizers.count),
            "buffer_bytes": _bytes(each for each in self.model.buffers() if not is_lazy(each)),
            "broadcast_bytes": _bytes(sent),
            "replicas": units[0].num_replicas if units else 1,
        }


def known_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the model's parameters without those of lazy modules that have not seen an input yet."""
    return [each for each in model.parameters() if not is_lazy(each)]


def _class_of(model: nn.Module) -> str:
    """Return the name of the user's model class, even if torch has wrapped the model or derived a class from it."""
    inner = getattr(model, "_orig_mod", getattr(model, "module", model))
    if inner is not model and isinstance(inner, nn.Module):
        return _class_of(inner)
    name = type(model).__name__
    return name.removeprefix("FSDP") if hasattr(model, "_get_fsdp_state") else name


def _optimizer(optimizer: torch.optim.Optimizer | None) -> Optimizer:
    """Return the optimizer as a job's optimizer if jobs support it; else a placeholder with its name."""
    if optimizer is None:
        return _stand_in("unknown", "torch.optim.Optimizer", {})
    groups, kind = optimizer.param_groups, type(optimizer)
    group = groups[0] if groups else {}
    rate = rate_of(optimizer, "initial_lr", "lr")
    lr = {} if rate is None else {"lr": rate}
    try:
        if kind is torch.optim.AdamW and not any(each["amsgrad"] for each in groups):
            return Optimizer("adamw", **lr, **_those(group, "betas", "eps", "weight_decay"))
        if kind is torch.optim.SGD and not any(each.get("nesterov") for each in groups):
            momentum = max(each["momentum"] for each in groups)  # groups without momentum keep no state
            return Optimizer("sgd", **lr, momentum=momentum, **_those(group, "weight_decay"))
    except SpecError:  # a setting that jobs reject, such as a learning rate of 0
        pass
    return _stand_in(kind.__name__, f"{kind.__module__}.{kind.__qualname__}", lr)


def _stand_in(name: str, torch_class: str, settings: dict[str, Any]) -> Optimizer:
    made: Optimizer = Optimizer.from_fields({"name": name, "observed": torch_class, **settings})
    return made


def _those(group: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: group[name] for name in names}


def _stateful(optimizer: torch.optim.Optimizer | None, parameters: Sequence[Tensor]) -> list[int] | None:
    """Return the indices of `parameters` for which the optimizer keeps state; None if it has any other parameters."""
    if optimizer is None:
        return None
    places = {id(each): place for place, each in enumerate(parameters)}
    groups = [group["params"] for group in optimizer.param_groups if group.get("momentum", True)]
    kept = [id(each) for group in groups for each in group if each.requires_grad]
    return sorted(places[each] for each in kept) if places.keys() >= set(kept) else None


def _row(unit: int, parameter: Tensor) -> ParameterRow:
    return ParameterRow(unit=unit, shape=tuple(parameter.shape), is_trained=parameter.requires_grad)


def _sharded_rows(parameters: Iterable[Tensor], units: list[FsdpUnit]) -> list[ParameterRow]:
    """Return a row per parameter with the index of its FSDP2 unit, which is ``len(units)`` for unsharded parameters."""
    places = {id(each): place for place, unit in enumerate(units) for each in unit.parameters}
    return [_row(places.get(id(each), len(units)), each) for each in parameters]


def _unit(unit: FsdpUnit) -> ShardedUnit:
    return ShardedUnit(
        gathered_element_bytes=unit.gathered_element_bytes,
        reduced_element_bytes=unit.reduced_element_bytes,
        gathers=2 if unit.frees else 1,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
