"""Recognises a transformer in a module, from its parameters and the shapes of the products of its forward pass.

The formulas for layouts then apply to a module of any class exactly as to a model from the catalogue. Modules that the
formulas would not describe are not recognised: blocks that differ from one another, mixtures of experts, attention that
is not one fused kernel or has its own mask (such as a window), frozen or shared blocks, blocks with many additional
operations, and modules whose matrix products or number of parameters differ from those of the transformer found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope.errors import SpecError
from shardscope.spec.model import Transformer
from shardscope.training.data.batches import call

_ATEN = torch.ops.aten
_MATRICES = {_ATEN.mm: 0, _ATEN.addmm: 1}
"""Index of the left matrix among the arguments of a matrix product."""
_NEGLIGIBLE = 0.01
"""Maximum fraction of FLOPs outside the recorded operations, such as in products that compute rotary angles."""
_MOST = 70
"""Maximum number of operations in the forward pass of a block, and outside the blocks; with more, kernel launches would
take longer than the formulas assume. Blocks whose norms and rotary positions are written out in Python have up to
55."""
_QUERY_KEY_VALUE = 3


class _Call(NamedTuple):
    """One operation that a transformer's formulas count.

    Attributes:
        kind: ``product``, ``attention`` or ``lookup``.
        unit: Number of the block that runs the operation, from 1; 0 outside the blocks.
        sizes: m, k and n; the shapes of queries and keys; or the shapes of table and indices.
    """

    kind: str
    unit: int
    sizes: tuple[Any, ...]


class Operations(TorchDispatchMode):
    """Dispatch mode that records the products, attention and embeddings of a forward pass, by block."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module, self.blocks, self.calls = module, _alike(module), list[_Call]()
        self.num_operations: Counter[int] = Counter()
        self.is_plain = True
        self._unit = 0
        for number, block in enumerate(self.blocks, 1):
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            block.register_forward_hook(lambda *_: self._enter(0))

    def _enter(self, unit: int) -> None:
        self._unit = unit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        try:
            self._record(func, args, kwargs or {})
        except Exception:  # noqa: BLE001 - a trace must not fail because of what is only recognised in it
            self.is_plain = False
        return results

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        packet = func.overloadpacket
        if func.namespace == "aten" and not func.is_view:
            self.num_operations[self._unit] += 1
        if packet in _MATRICES:
            (m, k), (_, n) = (each.shape for each in args[_MATRICES[packet] :][:2])
            self.calls.append(_Call("product", self._unit, (m, k, n)))
        elif packet.__name__.startswith("_scaled_dot_product"):
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            self.is_plain &= len(tensors) == _QUERY_KEY_VALUE  # others are masks: windows, positions, padding
            self.calls.append(
                _Call("attention", self._unit, tuple(tuple(each.shape) for each in tensors[:2]))
            )
        elif packet is _ATEN.embedding:
            self.calls.append(_Call("lookup", self._unit, (tuple(args[0].shape), tuple(args[1].shape))))

    @property
    def may_drop(self) -> bool:
        """Whether dropout may have hidden attention: on a CPU, it splits fused attention into separate products."""
        kinds = {each.kind for each in self.calls}
        return bool(self.blocks) and "lookup" in kinds and "attention" not in kinds

    def transformer(self, name: str, samples: int, flops: float) -> Transformer | None:
        """Return the transformer that the recorded operations form; None if they form none.

        Args:
            name: Name of the result.
            samples: Number of sequences in the example.
            flops: FLOPs of the whole forward pass; the recorded products must account for nearly all of them.
        """
        try:
            _need(self.is_plain and all(self.num_operations[unit] <= _MOST for unit in self.num_operations))
            _need(_flops(self.calls) >= (1 - _NEGLIGIBLE) * flops)
            return _transformer(self.module, self.blocks, self.calls, name, samples)
        except (SpecError, _UnlikeError, ArithmeticError, LookupError, TypeError, ValueError):
            return None


def without_dropout(module: nn.Module, inputs: Any) -> Operations:
    """Return the operations of a forward pass of a module in evaluation mode; `inputs` are its arguments."""
    operations = Operations(module.eval())
    with suppress(Exception), operations:
        call(module, inputs)
    return operations


def _flops(calls: Sequence[_Call]) -> float:
    products = sum(prod(each.sizes) for each in calls if each.kind == "product")
    attention = [each.sizes for each in calls if each.kind == "attention"]
    return float(2 * products + sum(4 * prod(queries) * keys[2] for queries, keys in attention))


def _alike(module: nn.Module) -> list[nn.Module]:
    """Return the adjacent modules of one class, without embeddings, that together have the most parameters;
    may be empty.
    """
    runs = [
        [*run]
        for part in module.modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        for _, run in groupby(part.children(), type)
    ]
    without = [
        run
        for run in runs
        if not any(isinstance(each, nn.Embedding) for part in run for each in part.modules())
    ]
    return max(without, key=_num_params, default=[])


def _num_params(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


class _UnlikeError(Exception):
    """The module is not a transformer that `Transformer` can describe."""


def _need(holds: object) -> None:
    if not holds:
        raise _UnlikeError


def _transformer(
    module: nn.Module, blocks: Sequence[nn.Module], calls: Sequence[_Call], name: str, samples: int
) -> Transformer:
    _need(blocks and all(parameter.requires_grad for parameter in module.parameters()))
    tables = [each.sizes for each in calls if each.kind == "lookup"]
    _need(tables and not any(each.unit for each in calls if each.kind == "lookup"))
    (vocab, hidden), indices = max(tables, key=lambda table: prod(table[1]))
    tokens = prod(indices)
    seq = tokens // samples
    products = [each for each in calls if each.kind in {"product", "attention"}]
    _need(all(each.sizes[0] == tokens for each in products if each.kind == "product"))
    _need([each.sizes for each in products if not each.unit] == [(tokens, hidden, vocab)])
    numbers = range(1, len(blocks) + 1)
    found = {_block_sizes([each for each in products if each.unit == unit], samples, seq) for unit in numbers}
    _need(len(found) == 1)
    sizes = dict(found.pop())
    _need(sizes["hidden"] == hidden)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    around = [tuple(each.shape) for each in module.parameters() if id(each) not in inside]
    sizes |= {**_norms(blocks[0], sizes), **_positions(tables, around, (vocab, hidden), seq)}
    matrices = around.count((vocab, hidden)) - [shape for shape, _ in tables].count((vocab, hidden))
    _need(matrices in {0, 1})
    sizes |= {"tied": matrices == 0}
    num_params, of_block = _num_params([module]), {_num_params([block]) for block in blocks}
    for qkv, out, ffn, ends, begins, head in product(*[(True, False)] * 4, *[(False, True)] * 2):
        made = Transformer(
            name=name, layers=len(blocks), vocab=vocab, seq=seq, **sizes, bias=ffn,
            qkv_bias=None if qkv == ffn else qkv, out_bias=None if out == ffn else out,
            final_norm=ends, embedding_norm=begins, head_bias=head,
        )  # fmt: skip
        if {made.layer_params} == of_block and made.num_params == num_params:
            return made
    raise _UnlikeError


def _block_sizes(calls: Sequence[_Call], samples: int, seq: int) -> tuple[tuple[str, Any], ...]:
    """Return the sizes of a block, inferred from its products and its attention in the order in which they run."""
    at = [place for place, each in enumerate(calls) if each.kind == "attention"]
    _need(len(at) == 1 and at[0] > 0)
    (_, heads, _, size), (_, key_heads, _, _) = queries, keys = calls[at[0]].sizes
    _need((queries[0], queries[2]) == (keys[0], keys[2]) == (samples, seq))
    hidden = calls[0].sizes[1]
    inward, others = ([each.sizes[1:] for each in part] for part in (calls[: at[0]], calls[at[0] + 1 :]))
    widths = sorted(width for _, width in inward)
    both = sum(widths) - heads * size
    _need(all(width == hidden for width, _ in inward) and both > 0 and both % (2 * size) == 0)
    _need(len(widths) == 1 or heads * size in widths)
    _need(len(widths) <= 2 or widths.count(both // 2) >= 2)
    _need(key_heads in {heads, both // (2 * size)})
    _need(len(others) >= 3 and (heads * size, hidden) in others)
    others.remove((heads * size, hidden))
    (ffn, after), up = others[-1], [n for k, n in others[:-1] if k == hidden]
    _need(after == hidden and len(up) == len(others) - 1 and up in ([ffn], [ffn] * 2, [2 * ffn]))
    return tuple({
        "hidden": hidden, "heads": heads, "kv_heads": both // (2 * size), "head_size": size, "ffn": ffn,
        "gated": sum(up) == 2 * ffn,
    }.items())  # fmt: skip


def _norms(block: nn.Module, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `Transformer` fields on norms: the modules of a block whose parameters are all one-dimensional."""
    own = [(part, [*part.parameters(recurse=False)]) for part in block.modules()]
    norms = [(part, each) for part, each in own if each and all(tensor.ndim == 1 for tensor in each)]
    widths = [tensors[0].numel() for _, tensors in norms]
    if not norms:
        return {"norm": "unweighted"}
    hidden, size = sizes["hidden"], sizes["head_size"]
    of_heads = [sizes["heads"] * size, sizes["kv_heads"] * size]
    is_whole = {hidden} != {*widths} and not Counter(of_heads) - Counter(widths)
    for width in of_heads if is_whole else ():
        widths.remove(width)
    within = [width for width in widths if width != hidden]
    has_biases = any(len(tensors) > 1 for _, tensors in norms)
    is_layer_norm = has_biases or any("LayerNorm" in type(part).__name__ for part, _ in norms)
    return {
        "norm": "layernorm" if is_layer_norm else "rmsnorm",
        "norm_bias": has_biases or not is_layer_norm,
        "norms_per_layer": widths.count(hidden),
        "qk_norm": "width" if is_whole else within == [size, size],
    }


def _positions(
    tables: Sequence[Any], around: Sequence[tuple[int, ...]], table: tuple[int, int], seq: int
) -> dict[str, Any]:
    """Return the `Transformer` fields on positions: learned if there is a second table or a parameter, else rotary."""
    learned = [shape for shape, _ in tables]
    learned.remove(table)
    learned += [shape[1:] for shape in around if len(shape) == 3 and shape[0] == 1]
    if not learned:
        return {"positions": "rotary"}
    _need(len(learned) == 1 and learned[0][1] == table[1] and learned[0][0] >= seq)
    return {"positions": "learned", "num_positions": 0 if learned[0][0] == seq else learned[0][0]}
