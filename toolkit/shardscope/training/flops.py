"""PyTorch's counter of FLOPs, with formulas that it lacks, and the names of matrix operations without a formula.

A multiply-add counts as two FLOPs, and as eight if its numbers are complex. Element-wise operations, sums, activations
and outer products count 0, because memory traffic determines their time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

_ATEN = torch.ops.aten
_COMPLEX = 4
"""Number of real multiply-adds in one complex multiply-add."""


def _last(matrix: Any, other: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product that sums over the last dimension of the first tensor."""
    return int(2 * prod(matrix) * (other[-1] if len(other) > 1 else 1))


def _added(_: Any, matrix: Any, other: Any, *__: Any, **___: Any) -> int:
    return _last(matrix, other)


def _grouped(one: Any, other: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of products of groups of rows or columns, which share a dimension unless both have three."""
    return int(2 * (one[0] if len(one) == len(other) == 3 else 1) * one[-2] * one[-1] * other[-1])


def _distances(one: Any, other: Any, *_: Any, **__: Any) -> int:
    return int(2 * prod(one) * other[-2])


def _trilinear(*arguments: Any, **_: Any) -> int:
    """Return the FLOPs of `nn.Bilinear`'s kernel: a product of two tensors, then one of the result with the third."""
    tensors, expanded, summed = arguments[:3], arguments[3:6], arguments[6]
    one, two, three = (with_ones(shape, places) for shape, places in zip(tensors, expanded, strict=True))
    both = [*map(max, one, two)]
    early = [place for place in summed if place in expanded[2]]
    between = [1 if place in early else size for place, size in enumerate(both)]
    late = len(early) < len(summed)
    return int(2 * prod(both) * bool(early) + 2 * prod(map(max, between, three)) * late)


def with_ones(shape: Any, places: Any) -> list[int]:
    """Return a shape with dimensions of size 1 at the given places of the result, in ascending order."""
    sizes = list(shape)
    for place in sorted(places):
        sizes.insert(place, 1)
    return sizes


def _recurrent(inputs: Any, of_input: Any, of_state: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a fused recurrent layer, in one direction: two products for each step of each sequence."""
    return int(2 * prod(inputs[:-1]) * (prod(of_input) + prod(of_state)))


def _recurrent_backward(*arguments: Any, **_: Any) -> int:
    return 2 * _recurrent(*arguments)


def _cudnn_recurrent(inputs: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of all recurrent layers of a module; its one-dimensional weights are biases, and count 0."""
    return int(2 * prod(inputs[:-1]) * sum(prod(shape) for shape in weights if len(shape) > 1))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _heads(query: Any, key: Any, width: int) -> int:
    """Return the FLOPs of attention with its projections, for tensors of shape (batch, sequence, width)."""
    samples, queries, _ = query
    keys = key[1]
    return int(2 * samples * (2 * queries + 2 * keys) * width**2 + 4 * samples * queries * keys * width)


def _multi_head(query: Any, key: Any, _: Any, width: int, *__: Any, **___: Any) -> int:
    return _heads(query, key, width)


def _encoder_layer(rows: Any, width: int, *others: Any, **_: Any) -> int:
    """Return the FLOPs of the fused `nn.TransformerEncoderLayer`, which models in evaluation mode run."""
    up, down = others[_UP], others[_DOWN]
    return _heads(rows, rows, width) + int(2 * prod(rows[:-1]) * (prod(up) + prod(down)))


_UP, _DOWN = 12, 14
"""Indices of the feed-forward weights among the arguments of the fused encoder layer after the first two."""

_ALSO_COUNTED: dict[Any, Callable[..., int]] = {
    _ATEN.mv: _last,
    _ATEN.dot: _last,
    _ATEN.vdot: _last,
    _ATEN.addmv: _added,
    _ATEN.addbmm: _added,
    _ATEN._addmm_activation: _added,
    _ATEN._int_mm: _last,
    _ATEN._grouped_mm: _grouped,
    _ATEN._scaled_grouped_mm: _grouped,
    _ATEN._euclidean_dist: _distances,
    _ATEN._trilinear: _trilinear,
    _ATEN.mkldnn_rnn_layer: _recurrent,
    _ATEN.mkldnn_rnn_layer_backward: _recurrent_backward,
    _ATEN._cudnn_rnn: _cudnn_recurrent,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._native_multi_head_attention: _multi_head,
    _ATEN._transformer_encoder_layer_fwd: _encoder_layer,
}
"""FLOP formulas, given the shapes of arguments, of operations that PyTorch's counter does not count."""
_MATRIX = re.compile(
    r"\w*mm|\w*mv|v?dot|matmul|matrix|(bi|tri)?linear|conv(olution|\dd)?|rnn|lstm|gru|attention|transformer"
    r"|[cp]dist|fft|linalg|\w*solve|cholesky|svd|eigh?|qr|lu|ldl|inverse|geqrf|or[gm]qr|householder|lstsq"
)
"""Words in the names of ATen's operations on matrices, and of transforms that are computed like them."""
_ELEMENTWISE = re.compile(r"upsample_\w+|_thnn_\w+|linalg_(vector_norm|cross)|_linalg_check_errors|lu_unpack")
_KNOWN = (
    "aten",
    "prim",
    "prims",
    "profiler",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
)
"""Namespaces whose operations are element-wise unless their names say otherwise."""


def _of_numbers(formula: Callable[..., int]) -> Callable[..., int]:
    """Return a formula that takes tensors, and counts the real multiply-adds of complex tensors."""

    def count(*arguments: Any, **options: Any) -> int:
        is_complex = any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in tree_leaves(arguments))
        return formula(*arguments, **options) * (_COMPLEX if is_complex else 1)

    count._get_raw = True  # type: ignore[attr-defined] # how PyTorch's counter knows such a formula
    return count


def _is_matrix_operation(func: Any) -> bool:
    """Return whether an operation is a matrix operation by its name, or was registered by a library or a user."""
    space, _, name = func._schema.name.partition("::")
    if space not in _KNOWN:
        return True
    return not _ELEMENTWISE.fullmatch(name) and any(
        _MATRIX.fullmatch(word) for word in name.rstrip("_").split("_")
    )


class _Names(TorchDispatchMode):
    """Dispatch mode that collects the names of matrix operations without a FLOP formula."""

    def __init__(self, found: dict[str, None], formulas: Collection[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.formulas = found, formulas

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in self.formulas and _is_matrix_operation(func):
            self.found[str(func.overloadpacket)] = None
        return func(*args, **(kwargs or {}))


class FlopCounter:
    """Context manager that counts the FLOPs of the operations within it.

    Attributes:
        uncounted: Names of the matrix operations, and of operations that a library or a user has registered, that have
            no FLOP formula and count 0; a formula is added with `torch.utils.flop_counter.register_flop_formula`.
    """

    def __init__(self) -> None:
        self.uncounted: dict[str, None] = {}
        formulas = {
            **{packet: shape_wrapper(each) for packet, each in _ALSO_COUNTED.items()},
            **flop_registry,
        }
        self._counter = FlopCounterMode(
            display=False, custom_mapping={packet: _of_numbers(each) for packet, each in formulas.items()}
        )
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        names = _Names(self.uncounted, self._counter.flop_registry)
        self._modes.enter_context(names)  # around the counter, which splits composite operations
        self._modes.enter_context(self._counter)
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def get_total_flops(self) -> int:
        """Return the number of FLOPs so far."""
        return int(self._counter.get_total_flops())


def flop_counter() -> FlopCounter:
    """Return a context manager whose ``get_total_flops()`` is the number of FLOPs of matrix products within it."""
    return FlopCounter()
