"""Memory that torch's CPU kernels take beside their results while they run, which a trace on shapes does not see.

Compared with what torch's allocator recorded on one thread of a processor with AVX-512 (torch 2.13, oneDNN 3.11);
tests/campaigns/modules.py compares them again.

- A convolution in float32 or bfloat16 copies its input and its output between torch's format and oneDNN's, in blocks of
  16 channels. oneDNN chooses among many kernels, some of which take a few percent more. In other dtypes, and for small
  products in float32, torch lists the patches under the kernel as the columns of a matrix instead.
- Attention computes the scores of a block of queries and of up to 512 keys at a time.
- `nn.Bilinear` computes its outputs one at a time.
- A fused LSTM layer: see `shardscope.training.onednn`.

Products of matrices in 16 bits take up to 150 KB, whatever their size, which is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from shardscope.training import onednn
from shardscope.training.flops import with_ones
from shardscope.training.memory.ledger import Scratch

_ATEN = torch.ops.aten
_CONVOLUTION, _CONVOLUTION_BACKWARD = _ATEN.convolution.default, _ATEN.convolution_backward.default
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - its name
_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
_TRILINEAR = _ATEN._trilinear.default  # noqa: SLF001 - its name
_BLOCK = 16
"""Channels in a block of oneDNN's format."""
_SOLID = 5
"""Dimensions of the input of a convolution of volumes."""
_QUERIES = ((768, 256), (192, 64), (0, 32))
"""Sequence lengths from which attention computes so many queries at a time."""
_KEYS = 512
_FEW = 3
"""Most input channels, such as those of an image, that the backward pass leaves as they are."""
_MANY_SAMPLES, _SMALL, _WIDE = 16, 20480, 3
"""Samples from which oneDNN computes products, and elements and size of the kernel up to which it leaves a sample."""


def scratch(func: Any, args: Any, results: Any) -> tuple[Scratch, ...]:
    """Return the memory that an operation takes on a CPU while it runs, beside its arguments and results."""
    if func is _CONVOLUTION:
        return _Convolution.of(args[0], args[1], results, *args[3:]).forward
    if func is _CONVOLUTION_BACKWARD:
        return _Convolution.of(args[1], args[2], args[0], *args[4:10]).backward(args[10])
    if func is _ATTENTION:
        return (_attention(args[0], args[1]),)
    if func is _ATTENTION_BACKWARD:
        return (_attention_backward(args[0], args[1], args[2]),)
    if func is _TRILINEAR:
        return (_trilinear(*args),)
    return onednn.scratch(func, args)


@dataclass(frozen=True)
class _Convolution:
    """A convolution: its tensors, and how its kernel moves over the input."""

    inputs: Tensor
    weight: Tensor
    output: Tensor
    is_strided: bool
    is_dilated: bool
    is_padded: bool
    is_transposed: bool
    groups: int

    @classmethod
    def of(  # noqa: PLR0917 - as its operation
        cls, inputs: Tensor, weight: Tensor, output: Tensor, stride: Any, padding: Any, dilation: Any,
        transposed: bool, _: Any, groups: int,
    ) -> Self:  # fmt: skip
        return cls(
            inputs, weight, output, set(stride) != {1}, set(dilation) != {1}, any(padding), transposed, groups
        )

    @property
    def is_blocked(self) -> bool:
        """Whether oneDNN computes the convolution (``use_mkldnn`` in ``aten/src/ATen/native/Convolution.cpp``)."""
        inputs, places = self.inputs, self.weight.shape[2:]
        if inputs.dtype is not torch.float32:
            return inputs.dtype is torch.bfloat16
        is_product = set(places[-2:]) == {1} and not self.is_strided and not self.is_dilated
        is_single = self.groups == 1 and len(inputs) == 1 and min(places[-2:]) <= _WIDE
        return not (is_product and len(inputs) < _MANY_SAMPLES) and not (
            is_single and prod(inputs.shape[:4]) <= _SMALL
        )

    @property
    def forward(self) -> tuple[Scratch, ...]:
        """Memory of the forward pass: while it computes, and while its output is copied."""
        if not self.is_blocked:
            return self._columns(is_forward=True)
        if not self.inputs.is_contiguous():  # channels last, as oneDNN wants them
            return (Scratch(0, 2 * self.weight.nbytes),)
        copied = _blocks(self.inputs) if self.inputs.shape[1] >= _BLOCK else 0
        wide = 4 * self.output.numel() if self.is_transposed else 0
        result = _blocks(self.output)
        computing = Scratch(wide + copied + result - self.output.nbytes, _blocks(self.weight))
        return computing, Scratch(result)

    def backward(self, wanted: Any) -> tuple[Scratch, ...]:
        """Return the memory of the backward pass; `wanted` says whether the input's gradient is computed."""
        if not self.is_blocked:
            return self._columns(is_forward=False)
        if not self.inputs.is_contiguous():
            return (Scratch(0, 3 * self.weight.nbytes),)
        return *(self._of_input if wanted[0] else ()), *self._of_weight

    @property
    def _of_input(self) -> tuple[Scratch, ...]:
        """Memory while the input's gradient is computed, before that of the weight is allocated."""
        gradient = _blocks(self.inputs)
        computing = max(_blocks(self.output) + gradient - self.inputs.nbytes, 0)
        return Scratch(computing, _blocks(self.weight) - self.weight.nbytes), Scratch(gradient)

    @property
    def _of_weight(self) -> tuple[Scratch, ...]:
        """Memory while the weight's gradient is computed; nothing is copied for groups of channels.

        In 16 bits, it is summed in float32, from one transposed sample after the other.
        """
        given = _blocks(self.output) + (_blocks(self.inputs) if self.inputs.shape[1] > _FEW else 0)
        short = self.inputs.element_size() == 2
        is_grouped = 1 < self.groups < self.inputs.shape[1]
        summed = (given // len(self.inputs) + 4 * self.weight.numel()) * short
        return Scratch(0 if is_grouped else given, summed), Scratch(0, _blocks(self.weight))

    def _columns(self, *, is_forward: bool) -> tuple[Scratch, ...]:
        """Return the memory of the patches under the kernel, of all samples or of one, and of copies of a group."""
        inputs, output = (self.output, self.inputs) if self.is_transposed else (self.inputs, self.output)
        is_solid = inputs.ndim == _SOLID
        is_product = set(self.weight.shape[2:]) == {1} and not (self.is_strided or self.is_padded or is_solid)
        is_single = self.is_dilated or (self.is_transposed and (is_solid or not is_forward))
        rows = inputs.shape[1] // self.groups * prod(self.weight.shape[2:])
        columns = 0 if is_product else rows * prod(output.shape[2:]) * inputs.element_size()
        patches = Scratch(0, columns) if is_single else Scratch(columns * len(inputs))
        if self.groups == 1:
            return (patches,)
        copied = self.inputs.nbytes + (0 if is_forward else self.output.nbytes)
        whole = Scratch(self.output.nbytes) if is_forward else Scratch(self.inputs.nbytes, self.weight.nbytes)
        return whole, patches._replace(grows=patches.grows + copied // self.groups)


def _blocks(tensor: Tensor) -> int:
    """Return the bytes of an input, an output or a weight in oneDNN's format; weights have blocks of both channels."""
    samples, channels, *places = tensor.shape
    return samples * -(-channels // _BLOCK) * _BLOCK * prod(places) * tensor.element_size()


def _attention(query: Tensor, key: Tensor) -> Scratch:
    """Return the memory of a block of scores, with its maxima, sums and results, in float32 or float64."""
    queries, keys = _score_block(query, key)
    wide = max(4, query.element_size())
    return Scratch(0, queries * (keys + 2 + query.shape[-1]) * wide + queries * keys * _short(query))


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor) -> Scratch:
    """Return the memory of a block of scores and its gradient, and of a copy of the result's gradient."""
    queries, keys = _score_block(query, key)
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return Scratch(copied, 2 * queries * keys * (max(4, query.element_size()) + _short(query)))


def _score_block(query: Tensor, key: Tensor) -> tuple[int, int]:
    length = query.shape[-2]
    queries = next(size for least, size in _QUERIES if length >= least)
    return min(length, queries), min(key.shape[-2], _KEYS)


def _short(tensor: Tensor) -> int:
    """Return the bytes of an element if it has 16 bits: then blocks are also kept in its dtype."""
    return 2 if tensor.element_size() == 2 else 0


def _trilinear(  # noqa: PLR0917 - as its operation
    one: Tensor,
    two: Tensor,
    three: Tensor,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    summed: Any,
    unroll: int = 1,
) -> Scratch:
    """Return the memory of the two products that the operation computes for one index of its unrolled dimension."""
    places = (one, expand1), (two, expand2), (three, expand3)
    first, second, third = (with_ones(tensor.shape, where) for tensor, where in places)
    first[unroll] = second[unroll] = third[unroll] = 1
    early = set(summed) & set(expand3)
    between = [
        1 if place in early else max(sizes) for place, sizes in enumerate(zip(first, second, strict=True))
    ]
    last = [
        1 if place in summed else max(sizes) for place, sizes in enumerate(zip(between, third, strict=True))
    ]
    grows, fixed = ((prod(each), 0) if each[0] > 1 else (0, prod(each)) for each in (between, last))
    return Scratch(*(sum(pair) * one.element_size() for pair in zip(grows, fixed, strict=True)))
