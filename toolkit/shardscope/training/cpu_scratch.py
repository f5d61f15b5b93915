"""Temporary memory (workspace) that torch's CPU kernels allocate while they run, which a trace on shapes does not see.

- A convolution in float32 or bfloat16 copies its input and its output between torch's format and oneDNN's, in blocks of
  channels: 16 with AVX-512, else 8. Tensors in channels-last order are not copied, only weights. Where oneDNN has no
      blocked kernel for groups of channels, in other dtypes, and for small products in float32, the patches under the
      kernel are instead copied to the columns of a matrix (im2col).
- Attention computes the scores of a block of queries and of up to 512 keys at a time.
- `nn.Bilinear` computes its outputs one at a time.
- Kernels that need contiguous tensors copy non-contiguous ones, such as a gradient that was expanded or permuted.
- Element-wise operations copy an operand whose dtype differs from that of the computation.
- A fused LSTM layer: see `shardscope.training.onednn`.

On one thread of a processor with AVX-512, the cases of tests/training/test_cpu_scratch.py are within 2 % of what torch
allocates (torch 2.13, oneDNN 3.11). Not included: the blocked copies of its matrices that a bfloat16 product of oneDNN
makes, up to three times the product's size for matrices of at most 512 rows. tests/campaigns/modules.py lists the cases
that are more than 2 % off. Without AVX-512, oneDNN has other kernels for some sizes, which allocate up to four copies
of a weight for images of 2 x 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Self

import torch
from torch import Tensor

from shardscope.training import onednn
from shardscope.training.flops import with_ones
from shardscope.training.memory.ledger import Scratch

_ATEN = torch.ops.aten
_CONVOLUTION, _CONVOLUTION_BACKWARD = _ATEN.convolution.default, _ATEN.convolution_backward.default
_TRILINEAR = _ATEN._trilinear.default  # noqa: SLF001 - its name
_SMALL_IMAGE, _COLOURS = 128, 3
"""Images up to this height plus width, with more than this number of channels, are upsampled in channels-last order."""
_LINE, _SOLID = 3, 5
"""Number of dimensions of the inputs of 1-d and 3-d convolutions."""
_QUERIES = ((768, 256), (192, 64), (0, 32))
"""Number of queries that attention computes at a time, by minimum sequence length."""
_KEYS = 512
_FEW = 3
"""Maximum number of input channels (as of an image) at which the weight gradient needs no blocked copy of the input."""
_MANY_SAMPLES, _SMALL, _WIDE = 16, 20480, 3
"""Minimum samples of a 1 x 1 convolution in oneDNN; maximum elements and kernel size of one sample outside oneDNN."""


def scratch(func: Any, args: Any, results: Any) -> tuple[Scratch, ...]:
    """Return the workspace that an operation allocates on a CPU while it runs."""
    if func is _CONVOLUTION:
        return _Convolution.of(args[0], args[1], results, *args[3:]).forward
    if func is _CONVOLUTION_BACKWARD:
        return _Convolution.of(args[1], args[2], args[0], *args[4:10]).backward(args[10])
    if func is _TRILINEAR:
        return (_trilinear(*args),)
    if func in _ONE_MOMENT:
        return (_ONE_MOMENT[func](args, results),)
    if torch.Tag.pointwise in func.tags:
        return (_cast(args),)
    return onednn.scratch(func, args)


def _copied(args: Any, *, with_last: bool) -> Scratch:
    """Return the memory of copies of non-contiguous tensors; `with_last` exempts tensors in channels-last order."""
    tensors = [each for each in args if isinstance(each, Tensor) and not each.is_contiguous()]
    return Scratch(sum(each.nbytes for each in tensors if not (with_last and _is_last(each))))


def _cast(args: Any) -> Scratch:
    """Return the memory of operands that are cast to the dtype of the computation (``TensorIterator``)."""
    tensors = [each for each in args if isinstance(each, Tensor) and each.ndim and each.is_floating_point()]
    dtype = max((each.dtype for each in tensors), key=lambda each: each.itemsize, default=None)
    return Scratch(sum(each.numel() * dtype.itemsize for each in tensors if dtype and each.dtype != dtype))


def _enlarged(image: Tensor, result: Tensor) -> Scratch:
    """Return the memory of channels-last copies of upsampled small images (``_use_vectorized_kernel_cond_2d``)."""
    is_small = sum(result.shape[-2:]) <= _SMALL_IMAGE and image.shape[1] > _COLOURS
    return Scratch((image.nbytes + result.nbytes) * (is_small and not _is_last(image)))


def _batch_norm_backward(gradient: Tensor, image: Tensor) -> Scratch:
    """Return the memory of one more gradient, which the kernel allocates if image and gradient have equal strides."""
    return Scratch(image.nbytes * (gradient.stride() == image.stride()))


def _is_last(tensor: Tensor) -> bool:
    """Return whether the tensor is an image or a volume in channels-last order, and not also contiguous."""
    formats = {4: torch.channels_last, _SOLID: torch.channels_last_3d}
    order = formats.get(tensor.ndim)
    return order is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=order)


def _has_avx512() -> bool:
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def _full_block() -> int:
    """Return the number of channels per block in oneDNN's format."""
    return 16 if _has_avx512() else 8


@dataclass(frozen=True)
class _Convolution:
    """A convolution: its tensors, groups, and kinds of stride, dilation and padding."""

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
            return inputs.dtype is torch.bfloat16 and _has_avx512()
        is_product = set(places[-2:]) == {1} and not self.is_strided and not self.is_dilated
        is_single = self.groups == 1 and len(inputs) == 1 and min(places[-2:]) <= _WIDE
        return not (is_product and len(inputs) < _MANY_SAMPLES) and not (
            is_single and prod(inputs.shape[:4]) <= _SMALL
        )

    @property
    def forward(self) -> tuple[Scratch, ...]:
        """Memory of the forward pass: while it computes, and while its output is copied."""
        if not self.is_blocked:
            return self._copied_line(self._columns(is_forward=True))
        if _is_last(self.inputs):
            return (Scratch(0, 2 * self.weight.nbytes),)
        copied = 0 if self.inputs.is_contiguous() else self.inputs.nbytes
        wide = 4 * self.output.numel() if self.is_transposed and not self.is_strided else 0  # to add the bias
        twice = (
            self.output.nbytes if self.is_transposed and self.is_strided else 0
        )  # its order is channels-last
        block = self._block("forward")
        if not block:
            return Scratch(copied + wide, self._one_sample), Scratch(copied + twice + self.output.nbytes)
        of_input = _blocks(self.inputs, block) if self.inputs.shape[1] >= block or self.groups > 1 else 0
        result = _blocks(self.output, block)
        computing = copied + wide + of_input + result - self.output.nbytes
        return Scratch(computing, self._weight_blocks(block)), Scratch(copied + twice + result)

    def backward(self, wanted: Any) -> tuple[Scratch, ...]:
        """Return the memory of the backward pass; `wanted` says whether the input's gradient is computed."""
        if not self.is_blocked:
            return self._copied_line(self._columns(is_forward=False))
        is_last = _is_last(self.inputs)
        copied = 0 if is_last or self.inputs.is_contiguous() else self.inputs.nbytes
        if not (_is_last(self.output) if is_last else self.output.is_contiguous()):
            copied += self.output.nbytes
        if is_last:
            return (Scratch(copied, 2 * self.weight.nbytes + self._last_weight),)
        moments = *(self._of_input if wanted[0] else ()), *self._of_weight
        return tuple(each._replace(grows=each.grows + copied) for each in moments)

    @property
    def _is_depthwise(self) -> bool:
        return self.groups > 1 and self.inputs.shape[1] == self.output.shape[1] == self.groups

    def _block(self, kind: Literal["forward", "input", "weight"]) -> int:
        """Return the number of channels per block in this pass's kernel; 0 if it copies patches to a matrix."""
        block = _full_block()
        inner, outer = (each.shape[1] // self.groups for each in (self.inputs, self.output))
        if self.groups == 1 and kind == "input" and self.is_strided:
            return 1  # in channels-last order
        if self.groups == 1:
            is_listed = kind == "weight" and self.is_dilated and (block == 8 or self.inputs.ndim == _SOLID)
            return 0 if is_listed else block
        if self._is_depthwise:
            is_gradient = kind != "forward" and (self.is_dilated or self.inputs.ndim == _SOLID)
            is_wide = kind == "weight" and self.weight.shape[-1] > _WIDE
            return 0 if is_gradient or is_wide else block
        smallest = 4 if block == 16 and kind != "weight" else 8
        sizes = [each for each in (16, 8, 4) if smallest <= each <= block]
        return next((size for size in sizes if inner % size == outer % size == 0), 0)

    @property
    def _of_input(self) -> tuple[Scratch, ...]:
        """Memory while the input's gradient is computed, before the weight's gradient is allocated."""
        later = self.weight.nbytes  # of its gradient, which is allocated afterwards
        block = self._block("input")
        if not block:
            return Scratch(0, max(self._one_sample - later, 0)), Scratch(max(self.inputs.nbytes - later, 0))
        gradient = _blocks(self.inputs, block)
        computing = max(_blocks(self.output, block) + gradient - self.inputs.nbytes, 0)
        twice = 2 if self.is_strided and self.groups == 1 else 1
        return Scratch(computing, max(self._weight_blocks(block) - later, 0)), Scratch(
            max(twice * gradient - later, 0)
        )

    @property
    def _of_weight(self) -> tuple[Scratch, ...]:
        """Memory while the weight's gradient is computed.

        In 16 bits, the gradient is summed in float32 and, unless the kernel is 1 x 1, from one transposed sample at a
        time.
        """
        block = self._block("weight")
        if not block:
            return (Scratch(0, self._one_sample),)
        few = self.groups == 1 and self.inputs.shape[1] <= _FEW
        given = _blocks(self.output, block) + (0 if few else _blocks(self.inputs, block))
        weight = self._weight_blocks(block)
        is_plain = self._is_depthwise or prod(self.weight.shape[2:]) == 1
        turned = 0 if is_plain else given // len(self.inputs)
        summed = (turned + 4 * self.weight.numel()) * (self.inputs.element_size() == 2)
        return Scratch(given, summed + max(weight - self.weight.nbytes, 0)), Scratch(0, weight)

    @property
    def _last_weight(self) -> int:
        """Bytes of the weight's gradient in channels-last order, with each group's channels padded to whole blocks.

        For 16-bit dtypes, this includes a float32 accumulator and one transposed sample.
        """
        if self._is_depthwise and self._block("weight"):
            return self.weight.nbytes
        block, size = _full_block(), self.weight.element_size()
        sides = (self.inputs, self.output)
        inner, outer = (-(-each.shape[1] // self.groups // block) * block for each in sides)
        padded = self.groups * inner * outer * prod(self.weight.shape[2:])
        turned = self.groups * (inner * prod(self.inputs.shape[2:]) + outer * prod(self.output.shape[2:]))
        return padded * size + (4 * padded + turned * size) * (size == 2)

    def _weight_blocks(self, block: int) -> int:
        """Return the bytes of the weight, with input and output channels padded to whole blocks if it has no groups."""
        outer, inner, *places = self.weight.shape
        if self.groups > 1:
            return self.weight.nbytes
        rounded = (-(-each // block) * block for each in (outer, inner))
        return prod((*rounded, *places)) * self.weight.element_size()

    @property
    def _one_sample(self) -> int:
        """Bytes of the im2col buffer for one group of one sample."""
        inner = self.inputs.shape[1] // self.groups
        return inner * prod(self.weight.shape[2:]) * prod(self.output.shape[2:]) * self.weight.element_size()

    def _copied_line(self, moments: tuple[Scratch, ...]) -> tuple[Scratch, ...]:
        """Add the contiguous copy of the input that torch makes for 1-d convolutions if necessary."""
        copied = self.inputs.nbytes if self.inputs.ndim == _LINE and not self.inputs.is_contiguous() else 0
        return tuple(each._replace(grows=each.grows + copied) for each in moments)

    def _columns(self, *, is_forward: bool) -> tuple[Scratch, ...]:
        """Return the memory of the patches under the kernel, for all samples or one, and of copies of one group.

        ``slow_conv3d`` processes all groups at once. In float16, the bias's gradient is summed from a float32 copy.
        """
        inputs, output = (self.output, self.inputs) if self.is_transposed else (self.inputs, self.output)
        is_solid = inputs.ndim == _SOLID
        is_plain = set(self.weight.shape[2:]) == {1} and not (self.is_strided or self.is_padded)
        is_product = is_plain and not (is_solid and (self.is_transposed or self.groups > 1 or not is_forward))
        is_single = self.is_dilated or (self.is_transposed and (is_solid or not is_forward))
        groups = 1 if is_solid and not is_single else self.groups
        rows = inputs.shape[1] // groups * prod(self.weight.shape[2:])
        columns = 0 if is_product else rows * prod(output.shape[2:]) * inputs.element_size()
        patches = Scratch(0, columns) if is_single else Scratch(columns * len(inputs))
        moments: tuple[Scratch, ...] = (patches,)
        if groups > 1:
            copied = self.inputs.nbytes + (0 if is_forward else self.output.nbytes)
            whole = (
                Scratch(self.output.nbytes) if is_forward else Scratch(self.inputs.nbytes, self.weight.nbytes)
            )
            moments = whole, patches._replace(grows=patches.grows + copied // groups)
        if self.inputs.dtype is torch.float16 and not (is_forward or self.is_dilated):
            kept = columns if self.is_transposed and is_solid else 0
            moments += (Scratch(4 * self.output.numel() // groups, kept),)
        return moments


def _blocks(tensor: Tensor, block: int) -> int:
    """Return the bytes of an input or an output in oneDNN's format."""
    samples, channels, *places = tensor.shape
    return samples * -(-channels // block) * block * prod(places) * tensor.element_size()


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
    """Return the bytes per element of a 16-bit tensor, whose blocks are also kept in its own dtype; else 0."""
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


_NEED_ROWS = (
    _ATEN.native_layer_norm.default,
    _ATEN.native_layer_norm_backward.default,
    _ATEN._softmax.default,  # noqa: SLF001 - its name
    _ATEN._softmax_backward_data.default,  # noqa: SLF001
    _ATEN._log_softmax.default,  # noqa: SLF001
    _ATEN._log_softmax_backward_data.default,  # noqa: SLF001
)
"""Operations that copy arguments that are not contiguous."""
_NEED_IMAGES = (
    _ATEN.max_pool2d_with_indices.default,
    _ATEN.max_pool2d_with_indices_backward.default,
    _ATEN.avg_pool2d.default,
    _ATEN.avg_pool2d_backward.default,
    _ATEN.upsample_nearest2d_backward.default,
    _ATEN.upsample_bilinear2d_backward.default,
)
"""Operations that copy arguments that are neither contiguous nor in channels-last order."""
_PER_ELEMENT = (_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default, _ATEN.huber_loss.default)
"""Losses that first compute one value per element of their input."""
_ONE_MOMENT: dict[Any, Callable[[Any, Any], Scratch]] = {
    **dict.fromkeys(_PER_ELEMENT, lambda args, _: Scratch(args[0].nbytes)),
    _ATEN.binary_cross_entropy_with_logits.default: lambda args, _: Scratch(2 * args[0].nbytes),
    **dict.fromkeys(_NEED_ROWS, lambda args, _: _copied(args, with_last=False)),
    **dict.fromkeys(_NEED_IMAGES, lambda args, _: _copied(args, with_last=True)),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: lambda args, _: _attention(*args[:2]),  # noqa: SLF001
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: (  # noqa: SLF001
        lambda args, _: _attention_backward(*args[:3])
    ),
    _ATEN.native_batch_norm_backward.default: lambda args, _: _batch_norm_backward(*args[:2]),
    _ATEN.upsample_nearest2d.default: lambda args, result: _enlarged(args[0], result),
    _ATEN.upsample_bilinear2d.default: lambda args, result: _enlarged(args[0], result),
    _ATEN._embedding_bag_backward.default: lambda args, _: Scratch(3 * args[1].nbytes),  # noqa: SLF001
    _ATEN.im2col.default: lambda args, _: Scratch(args[0].nbytes),
    _ATEN.col2im.default: lambda args, result: Scratch(max(args[0].nbytes - result.nbytes, 0)),
}
"""Workspace of other operations. The last two first allocate a result of their input's size."""
