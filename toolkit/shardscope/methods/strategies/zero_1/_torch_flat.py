"""Flat buckets of parameters and gradients, each split into chunks, one per rank.

A parameter becomes a view of its bucket, so gathering the bucket in place also gathers the parameter. The gradient is
accumulated in a view of a second buffer, so reducing it needs no copy. With ZeRO-1, each bucket has such a buffer; with
ZeRO-2, it has one only while it is filled and reduced, and otherwise just the gradients of the rank's chunk. A chunk
can start or end inside a parameter. The part of a parameter that lies in the chunk, which may be empty, is called the
rank's piece of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardscope.training.strategies.partitioned import ParameterShare

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class FlatPiece(ParameterShare):
    """Elements `start` to `stop` - 1 of a flattened parameter."""

    start: int
    stop: int
    grad: Tensor
    """Gradients of these elements, as a view of the bucket's gradients."""


@dataclass
class FlatBucket:
    """One flat bucket of consecutive parameters, on one of `world_size` ranks.

    Attributes:
        named: Names and parameters, in bucket order.
        rank: This rank.
        world_size: Number of ranks.
        even: Whether to pad the bucket to a multiple of the number of ranks, as the backends' collectives require.
        chunk_sizes: Function that returns the size of each rank's chunk, given the number of elements in a bucket.
        keeps_gradients: Whether the bucket has a buffer for the gradients of all elements.
        weights: Elements of all parameters; the parameters are views of this tensor.
        grads: Gradients of all elements; only after `fill` if the bucket has no buffer for them.
        own_grads: Gradients of this rank's chunk: a view of `grads` if the bucket keeps all gradients.
        pieces: This rank's piece of each parameter.
    """

    named: Sequence[Named]
    rank: int
    world_size: int
    even: bool
    chunk_sizes: Callable[[int], list[int]]
    keeps_gradients: bool = True
    weights: Tensor = field(init=False)
    grads: Tensor = field(init=False)
    own_grads: Tensor = field(init=False)
    pieces: list[FlatPiece] = field(init=False)

    def __post_init__(self) -> None:
        first = self.named[0][1]
        num_elements = sum(parameter.numel() for _, parameter in self.named)
        if self.even:
            num_elements += -num_elements % self.world_size
        self.weights = torch.zeros(num_elements, dtype=first.dtype, device=first.device)
        sizes = self.chunk_sizes(num_elements)
        self.first = sum(sizes[: self.rank])
        self.last = self.first + sizes[self.rank]
        if self.keeps_gradients:
            self.grads = torch.zeros_like(self.weights)
            self.own_grads = self.own(self.grads)
        else:
            self.own_grads = torch.zeros_like(self.own(self.weights))
        self.pieces = []
        offset = 0
        for name, parameter in self.named:
            self.pieces.append(self._take(name, parameter, offset))
            offset += parameter.numel()

    def _take(self, name: str, parameter: nn.Parameter, offset: int) -> FlatPiece:
        """Move a parameter into the bucket, and return this rank's piece of it."""
        size = parameter.numel()
        home = self.weights[offset : offset + size]
        home.copy_(parameter.detach().reshape(-1))
        parameter.data = home.view(parameter.shape)
        start, stop = (min(max(edge - offset, 0), size) for edge in (self.first, self.last))
        inside = offset - self.first
        grad = self.own_grads[max(0, inside + start) : max(0, inside + stop)]
        return FlatPiece(name, parameter, nn.Parameter(home[start:stop]), start, stop, grad)

    def clear_gradients(self) -> None:
        """Set all gradients to zero, and make the gradient of each parameter a view of the bucket's gradients."""
        self.grads.zero_()
        grads = self.wholes(self.grads)
        for name, parameter in self.named:
            parameter.grad = grads[name]

    def fill(self, buffer: Tensor) -> None:
        """From now on, accumulate gradients in a buffer of bytes; gradients that have already arrived are copied to
        it.
        """
        self.grads = buffer[: self.weights.nbytes].view(self.weights.dtype).zero_()
        views = self.wholes(self.grads)
        for name, parameter in self.named:
            if parameter.grad is not None:
                views[name].copy_(parameter.grad)
            parameter.grad = views[name]

    def drop_gradients(self) -> None:
        """Detach the parameters from the buffer, so that another bucket can fill it."""
        for _, parameter in self.named:
            parameter.grad = None

    @property
    def layout(self) -> list[tuple[str, torch.Size]]:
        """Names and shapes of all tensors in the bucket, including the padding."""
        laid = [(name, parameter.shape) for name, parameter in self.named]
        padding = self.weights.numel() - sum(shape.numel() for _, shape in laid)
        return [*laid, (f"{laid[0][0]}.padding", torch.Size([padding]))] if padding else laid

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's chunk of a tensor that is laid out like the bucket."""
        return flat[self.first : self.last]

    def wholes(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a tensor that is laid out like the bucket: by parameter name, in the parameter's shape."""
        sizes = [parameter.numel() for _, parameter in self.named]
        parts = flat[: sum(sizes)].split(sizes)
        return {name: part.view(p.shape) for (name, p), part in zip(self.named, parts, strict=True)}


def cut_into_buckets(parameters: Sequence[Named], bucket_bytes: int) -> list[list[Named]]:
    """Group parameters into buckets in reverse order, which is the order of their gradients in the backward pass.

    Each bucket has one dtype, one device, and at least one parameter.

    Args:
        parameters: Names and parameters, in the model's order.
        bucket_bytes: Largest size of a bucket with more than one parameter, in bytes.
    """
    buckets: list[list[Named]] = []
    filled = 0
    for name, parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if not buckets or filled + size > bucket_bytes or _kind(buckets[-1][0][1]) != _kind(parameter):
            buckets.append([])
            filled = 0
        buckets[-1].append((name, parameter))
        filled += size
    return buckets


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
