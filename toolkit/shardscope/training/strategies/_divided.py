"""What a strategy does with a model that is divided over a tensor group: the first division, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.training.data import call, map_tensors
from shardscope.training.observe import random_state_kept
from shardscope.training.optim.holding import Holding
from shardscope.training.optim.trial import failure_text
from shardscope.training.sharding import TensorPart
from shardscope.training.tensor import TensorSplit
from shardscope.training.tensor.split import outputs_of
from shardscope.training.twin import twin_of

_EXACT = torch.float32
_SAME = {torch.float64: 1e-9, _EXACT: 1e-4}
"""Largest difference that sums in another order explain, by dtype, relative to the largest element of a tensor."""
_SAME_IN_FEWER_BITS = 1e-2
_SMALL = 1e-2
"""Gradients of a parameter count as rounding errors below the accuracy of this share of the model's largest gradient,
as those of a bias that the loss does not depend on."""


def divide_checked(model: nn.Module, split: TensorSplit, inputs: Any) -> None:
    """Divide a model in place, and check on an example that it still trains the same; called by all ranks.

    Outputs, and the gradients of all parameters for a random gradient of the outputs, are compared with those of the
    whole model, in fp32 if the weights have fewer bits. A model that draws random numbers is compared in evaluation
    mode, where it must not draw any; in training, its ranks must have the same outputs.

    Args:
        model: The model, the same on all ranks.
        split: How it is divided.
        inputs: Inputs of the model, the same on all ranks.

    Raises:
        SpecError: The model draws random numbers in evaluation mode, or its parts together do not compute what the
            whole model does.
    """
    whole = Passes.of(model, inputs)
    if draws := whole.draws:
        whole = Passes.of(model, inputs, in_training=False)
        if whole.draws:
            raise SpecError(
                "the model draws random numbers in evaluation mode too, so its parts cannot be compared with the whole "
                "model; draw them only while model.training, or use tensor=1"
            )
        split.axis = replace(split.axis, draws=True)
    split.divide(model)
    try:
        parts = Passes.of(model, inputs, in_training=not draws)
        drawn = Passes.of(model, inputs).outputs if draws else []
    except SpecError:
        raise
    except Exception as error:  # on all ranks, whose parts have equal shapes
        raise SpecError(
            f"the divided model fails on an example ({failure_text(error)}); check that the plan's 'columns' layers "
            f"feed 'rows' layers, and that tensor={split.axis.size} divides the number of attention heads"
        ) from error
    _require_same(whole, parts, split)
    pairs = ((each, out) for out in drawn for each in split.axis.of_all_ranks(out))
    if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs):
        raise SpecError(
            "the ranks of a tensor group have different outputs when the model draws random numbers, such as for "
            "dropout; check that each 'columns' layer feeds a 'rows' layer, and that the model draws from torch's own "
            "generator, or set its dropout to 0"
        )


@dataclass(frozen=True)
class Passes:
    """Result of a forward and a backward pass of a copy of a model.

    Attributes:
        outputs: The outputs.
        gradients: The gradient of each trained parameter, by name, for a random gradient of the outputs.
        draws: Whether the forward pass has drawn random numbers.
        ends: The gradients of the outputs.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    draws: bool
    ends: list[Tensor]

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Any, *, in_training: bool = True, ends: list[Tensor] | None = None,
        axis: str = "tensor",
    ) -> Passes:  # fmt: skip
        """Run both passes, which change nothing in the model; without gradients if it draws random numbers.

        Args:
            model: The model.
            inputs: Its inputs.
            in_training: Whether the model is in training mode.
            ends: The gradients of the outputs; None for random ones, the same in every call.
            axis: The axis whose division is checked, for messages.
        """
        own = {p: nn.Parameter(_exact(p.detach()), requires_grad=p.requires_grad) for p in model.parameters()}
        twin = twin_of(model, own)
        if twin is None:
            raise SpecError(
                "the model contains an object that cannot be copied, such as a lock, so its division cannot be "
                f"checked; use {axis}=1"
            )
        if any(parameter.dtype.itemsize < _EXACT.itemsize for parameter in model.parameters()):
            twin.float()  # its buffers
        if not in_training:
            twin.eval()
        with random_state_kept(), _full_precision(), torch.enable_grad():
            before = _generators()
            outputs = list(outputs_of(call(twin, map_tensors(_exact, inputs))))
            draws = not all(map(torch.equal, before, _generators()))
            trained = {name: own[p] for name, p in model.named_parameters() if p.requires_grad}
            ends = _ends(outputs) if ends is None else ends
            found = {} if draws else _gradients(outputs, ends, trained)
        return cls([tensor.detach().clone() for tensor in outputs], found, draws, ends)

    @property
    def small(self) -> float:
        """The size below which elements of a gradient count as rounding errors, in the accuracy of their dtype."""
        return _SMALL * max((largest(gradient) for gradient in self.gradients.values()), default=0.0)


def _exact(tensor: Tensor) -> Tensor:
    """Return a tensor of fewer bits than fp32 in fp32, where rounding hides no wrong gradient; others unchanged."""
    return (
        tensor.to(_EXACT)
        if tensor.is_floating_point() and tensor.dtype.itemsize < _EXACT.itemsize
        else tensor
    )


def _ends(outputs: list[Tensor]) -> list[Tensor]:
    """Return a random gradient of each output, the same in every call."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(out.shape, generator=draw).to(out) for out in outputs]


def _gradients(outputs: list[Tensor], ends: list[Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of parameters by name, for gradients of the outputs."""
    pairs = [(out, end) for out, end in zip(outputs, ends, strict=True) if out.requires_grad]
    if not pairs or not trained:
        return {}
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        [*trained.values()],
        [end for _, end in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: grad.to_dense() for name, grad in zip(trained, found, strict=True)}


def _generators() -> list[Tensor]:
    """Return the states of the generators of random numbers that layers use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


@contextmanager
def _full_precision() -> Iterator[None]:
    """Return a context manager in which GPUs do not shorten the factors of fp32 products."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _require_same(whole: Passes, parts: Passes, split: TensorSplit) -> None:
    """Refuse a division that changes outputs or gradients on any rank of the group, with the same error on all."""
    small = whole.small
    pairs = zip(whole.outputs, parts.outputs, strict=True)
    differs = [any(differ(*pair) for pair in pairs)]
    for name, gradient in whole.gradients.items():
        differs.append(differ(split.own(name, gradient), parts.gradients[name], small))
    device = parts.outputs[0].device if parts.outputs else None
    counts = torch.tensor(differs, dtype=torch.float32, device=device)
    split.axis.sum_(counts)
    of_outputs, *of_parameters = counts.tolist()
    if of_outputs:
        raise SpecError(
            "the divided model does not compute what the whole one does; check that the plan's 'columns' layers feed "
            "only 'rows' layers, with operations between them that treat each column or each head by itself, and that "
            "a layer of several outputs in one is 'columns:N'"
        )
    first = next((name for name, count in zip(whole.gradients, of_parameters, strict=True) if count), None)
    if first is not None and first in split.cuts:
        raise SpecError(
            f"parameter {first!r} is divided, but the gradient of its parts is not that of the whole model; check that "
            "the operations between the plan's 'columns' and 'rows' layers treat each column or each head by itself"
        )
    if first is not None:
        raise SpecError(
            f"parameter {first!r} is whole, but each tensor rank has only the gradient of its own columns or heads; "
            "give its layer the rule 'shared', or leave the layers whose outputs it gets out of the plan; and call "
            "divided layers as modules, not functions with their weights"
        )


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of the finite elements."""
    return float(torch.where(tensor.isfinite(), tensor, 0.0).abs().max()) if tensor.numel() else 0.0


def differ(before: Tensor, after: Tensor, small: float = 0.0) -> bool:
    """Return whether a difference is more than rounding, relative to the largest element or to `small`."""
    if before.shape != after.shape:
        return True
    if not before.numel():
        return False
    same = torch.where(before.isfinite() | after.isfinite(), before - after, 0.0)
    bound = _SAME.get(before.dtype, _SAME_IN_FEWER_BITS) * max(largest(before), small)
    return not float(same.abs().max()) <= bound  # true if it is NaN


@dataclass(frozen=True)
class TensorHolding(Holding):
    """How ranks hold parameters that are divided over a tensor group, and `inner` over the data axis."""

    inner: Holding
    split: TensorSplit

    is_split: ClassVar[bool] = True

    @classmethod
    def of(cls, inner: Holding, split: TensorSplit) -> TensorHolding:
        """Return the holding for that of the data axis."""
        place = f"{split.axis.name} {split.axis.rank} of {split.axis.size}"
        return cls(f"{inner.layout} {place}", inner, split)

    def join(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: self.split.piece(name, tensor) for name, tensor in self.inner.join(parts).items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        return self.inner.part(name, whole.part if isinstance(whole, TensorPart) else whole)

    def whole(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(self.inner, TensorHolding):
            part = self.inner.whole(name, like, dtype)
        else:
            part = torch.empty(self.inner.shape(name, like), dtype=dtype, device=like.device)
        return self.split.piece(name, part)

    def shape(self, name: str, held: Tensor) -> tuple[int, ...]:
        return self.split.shape(name, self.inner.shape(name, held))
