"""Layers that work on a part of each sequence, between the divided layers of a tensor group (sequence parallelism).

Layers that treat each token by itself, such as norms, need not be computed by all ranks for all tokens: the first such
layer cuts its input, the last joins its output. Their parameters see a rank's tokens only, so the ranks sum gradients.

Source:
    Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import Cut, Join, SumGradients


def cut_sequences(
    layers: Sequence[tuple[str, nn.Module]], divided: Collection[str], axis: TensorAxis
) -> None:
    """Make layers, which run one after another, work on this rank's part of each sequence.

    Args:
        layers: The layers with their names, in the order in which they run.
        divided: Names of the divided parameters, whose gradients are those of whole sequences.
        axis: The ranks.
    """
    layers[0][1].register_forward_pre_hook(_CutInput(axis), with_kwargs=True)
    layers[-1][1].register_forward_hook(_JoinOutput(axis))
    for prefix, layer in layers:
        for name, module in layer.named_modules(prefix=prefix):
            whole = [
                own for own, _ in module.named_parameters(recurse=False) if f"{name}.{own}" not in divided
            ]
            if whole:
                cls = type(module)
                module.__class__ = type(f"SequencePartOf{cls.__name__}", (_SumsGradients, cls), {})
                module.sequence_axis, module.of_parts = axis, tuple(whole)


class _SumsGradients(nn.Module):
    """Mixin of a layer whose parameters get the sum of the gradients of all ranks' tokens."""

    sequence_axis: TensorAxis
    of_parts: tuple[str, ...]
    """Names of these parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._summing():
            return super().forward(*args, **kwargs)

    @contextmanager
    def _summing(self) -> Iterator[None]:
        own = {name: parameter for name, parameter in self._parameters.items() if name in self.of_parts}
        entered: Any = SumGradients.apply(self.sequence_axis, *own.values())  # type: ignore[no-untyped-call]
        self._parameters.update(zip(own, entered, strict=True))
        try:
            yield
        finally:
            self._parameters.update(own)


def _first_of(values: Any) -> Tensor:
    """Return a tensor, or the first of a tuple."""
    return values if isinstance(values, Tensor) else _first_of(values[0])


def _with_first(values: Any, first: Tensor) -> Any:
    """Return a tensor, or a tuple that begins with one, with another tensor in its place."""
    return first if isinstance(values, Tensor) else (_with_first(values[0], first), *values[1:])


@dataclass(frozen=True)
class _CutInput:
    """Hook that keeps this rank's part of the sequences in a layer's first argument."""

    axis: TensorAxis

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        values = args or tuple(kwargs.values())
        whole = _first_of(values)
        if layer.training:
            self.axis.begin_divided(whole.device)
        values = _with_first(values, Cut.apply(whole, self.axis))  # type: ignore[no-untyped-call]
        return (values, kwargs) if args else ((), dict(zip(kwargs, values, strict=True)))


@dataclass(frozen=True)
class _JoinOutput:
    """Hook that gathers the whole sequences of a layer's output, or of the first of its outputs."""

    axis: TensorAxis

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002 - torch's signature
        part = _first_of(output)
        if layer.training:
            self.axis.end_divided(part.device)
        return _with_first(output, Join.apply(part, self.axis))  # type: ignore[no-untyped-call]
