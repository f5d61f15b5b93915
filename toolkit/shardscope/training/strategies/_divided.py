"""What a strategy does with a model that is divided over a tensor group: the first division, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.training.data import call
from shardscope.training.observe import random_state_kept
from shardscope.training.optim.holding import Holding
from shardscope.training.optim.trial import failure_text
from shardscope.training.tensor import TensorSplit
from shardscope.training.tensor.split import outputs_of
from shardscope.training.twin import twin_of

_SAME = {torch.float64: 1e-6}
"""Largest difference of outputs, relative to the largest output, that sums in another order explain, by dtype."""
_SAME_IN_FEWER_BITS = 1e-2


def divide_checked(model: nn.Module, split: TensorSplit, inputs: Any) -> None:
    """Divide a model in place, and check on an example that it still computes the same; called by all ranks.

    Args:
        model: The model, the same on all ranks.
        split: How it is divided.
        inputs: Inputs of the model, the same on all ranks.

    Raises:
        SpecError: The model draws random numbers, or its parts together do not compute what the whole model does.
    """
    before, draws = _outputs(model, inputs)
    if draws:
        raise SpecError(
            "the model draws random numbers in its forward pass, such as for dropout, which is not available with "
            "tensor parallelism yet; set its dropout to 0, or use tensor=1"
        )
    split.divide(model)
    try:
        after, _ = _outputs(model, inputs)
    except Exception as error:  # on all ranks, whose parts have equal shapes
        raise SpecError(
            f"the divided model fails on an example ({failure_text(error)}); check that the plan's 'columns' layers "
            f"feed 'rows' layers, and that tensor={split.axis.size} divides the number of attention heads"
        ) from error
    worst = max((_difference(*pair) for pair in zip(before, after, strict=True)), default=0.0)
    dtype = next((tensor.dtype for tensor in before), torch.float32)
    if not worst <= _SAME.get(dtype, _SAME_IN_FEWER_BITS):
        raise SpecError(
            f"the divided model does not compute what the whole one does: outputs differ by {worst:.2g} of the largest "
            "one; check that the plan's 'columns' layers feed only 'rows' layers, with operations between them that "
            "treat each column or each head by itself, and that a layer of several outputs in one is 'columns:N'"
        )


def _outputs(model: nn.Module, inputs: Any) -> tuple[list[Tensor], bool]:
    """Return the outputs of a copy of the model in training, and whether the pass has drawn random numbers."""
    twin = twin_of(model)
    if twin is None:
        raise SpecError(
            "the model contains an object that cannot be copied, such as a lock, so its division cannot be checked; "
            "use tensor=1"
        )
    with random_state_kept(), torch.no_grad():
        state = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        found = [tensor.clone() for tensor in outputs_of(call(twin, inputs))]
        draws = not torch.equal(state, torch.get_rng_state())
        if on_gpu is not None:
            draws = draws or not torch.equal(on_gpu, torch.cuda.get_rng_state())
    return found, draws


def _difference(before: Tensor, after: Tensor) -> float:
    if before.shape != after.shape:
        return float("inf")
    if not before.numel():
        return 0.0
    same = torch.where(before.isfinite() | after.isfinite(), before - after, 0.0)
    largest = torch.where(before.isfinite(), before, 0.0).abs().max()
    return float(same.abs().max() / largest.clamp(min=torch.finfo(before.dtype).tiny))


@dataclass(frozen=True)
class TensorHolding(Holding):
    """How ranks hold parameters that are divided over a tensor group, and `inner` over the data axis."""

    inner: Holding
    split: TensorSplit

    is_split: ClassVar[bool] = True

    @classmethod
    def of(cls, inner: Holding, split: TensorSplit) -> TensorHolding:
        """Return the holding for that of the data axis."""
        return cls(f"{inner.layout} tensor {split.axis.rank} of {split.axis.size}", inner, split)

    def join(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: self.split.whole(name, tensor) for name, tensor in self.inner.join(parts).items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        return self.inner.part(name, self.split.own(name, whole))

    def whole(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape(name, like), dtype=dtype, device=like.device)

    def shape(self, name: str, held: Tensor) -> tuple[int, ...]:
        return self.split.shape(name, self.inner.shape(name, held))


Share = Callable[[Tensor], object]
