"""Recognises a transformer in a module, from its parameters and the shapes of the products of its forward pass.

The formulas for layouts then apply to a module of any class exactly as to a model from the catalogue. What they would
not describe is not recognised: blocks that differ, mixtures of experts, attention that is not one fused kernel, frozen
or shared blocks, and anything with other products or another number of parameters than the transformer found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardscope.errors import SpecError
from shardscope.spec.model import Transformer

_ATEN = torch.ops.aten
_MATRICES = {_ATEN.mm: 0, _ATEN.addmm: 1}
"""Place of the left matrix among the arguments of a product of two matrices."""
_NEGLIGIBLE = 0.01
"""Largest share of the FLOPs that other operations may have, such as the products that compute rotary angles."""


class _Call(NamedTuple):
    """One operation: a product of (m x k) by (k x n) matrices, attention on queries, a lookup, or another product.

    Attributes:
        kind: ``product``, ``attention``, ``lookup``, or ``other`` for other operations with FLOPs.
        unit: Number of the block that runs it, from 1; 0 outside the blocks.
        sizes: m, k and n; the shape of the queries; the shapes of table and indices; or the FLOPs.
    """

    kind: str
    unit: int
    sizes: tuple[Any, ...]


class Operations(TorchDispatchMode):
    """Dispatch mode that records the products, attention and embeddings of a forward pass, by block."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module, self.blocks, self.calls = module, _most_alike(module), list[_Call]()
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
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if packet in _MATRICES:
            (m, k), (_, n) = (each.shape for each in args[_MATRICES[packet] :][:2])
            self.calls.append(_Call("product", self._unit, (m, k, n)))
        elif name.startswith("_scaled_dot_product"):
            self.calls.append(_Call("attention", self._unit, tuple(args[0].shape)))
        elif packet is _ATEN.embedding:
            self.calls.append(_Call("lookup", self._unit, (tuple(args[0].shape), tuple(args[1].shape))))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=results)
            self.calls.append(_Call("other", self._unit, (flops,)))
        return results

    def transformer(self, name: str) -> Transformer | None:
        """Return the transformer that has run, or None if it is not one; `name` is what the result is called."""
        try:
            return _transformer(self.module, self.blocks, self.calls, name)
        except (SpecError, _UnlikeError):
            return None


def _most_alike(module: nn.Module) -> list[nn.Module]:
    """Return the contents of the list of modules of one class that has the most parameters; empty if there is none."""
    lists = [
        [*part.children()] for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)
    ]
    alike = [parts for parts in lists if len({type(part) for part in parts}) == 1]
    return max(alike, key=_num_params, default=[])


def _num_params(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


class _UnlikeError(Exception):
    """The module is not a transformer that `Transformer` describes."""


def _need(holds: object) -> None:
    if not holds:
        raise _UnlikeError


def _transformer(
    module: nn.Module, blocks: Sequence[nn.Module], calls: Sequence[_Call], name: str
) -> Transformer:
    _need(blocks and all(parameter.requires_grad for parameter in module.parameters()))
    tables = [call.sizes for call in calls if call.kind == "lookup"]
    _need(tables and not any(call.unit for call in calls if call.kind == "lookup"))
    (vocab, hidden), indices = max(tables, key=lambda table: prod(table[1]))
    seq, tokens = indices[-1], prod(indices)
    products = [call for call in calls if call.kind in {"product", "attention"}]
    flops = 2 * sum(prod(call.sizes) for call in products if call.kind == "product")
    _need(sum(call.sizes[0] for call in calls if call.kind == "other") <= _NEGLIGIBLE * flops)
    _need(all(call.sizes[0] == tokens for call in products if call.kind == "product"))
    _need([call.sizes for call in products if not call.unit] == [(tokens, hidden, vocab)])
    numbers = range(1, len(blocks) + 1)
    found = {_block_sizes([call for call in products if call.unit == unit]) for unit in numbers}
    _need(len(found) == 1)
    sizes = dict(found.pop())
    _need(sizes["hidden"] == hidden)
    sizes |= {**_norms(blocks[0], sizes), **_positions(tables, vocab, hidden, seq)}
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    around = [tuple(each.shape) for each in module.parameters() if id(each) not in inside]
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


def _block_sizes(calls: Sequence[_Call]) -> tuple[tuple[str, Any], ...]:
    """Return the sizes of a block from its products and its attention, in order."""
    at = [place for place, call in enumerate(calls) if call.kind == "attention"]
    _need(len(at) == 1 and at[0] > 0)
    _, heads, _, size = calls[at[0]].sizes
    hidden = calls[0].sizes[1]
    inward, others = ([call.sizes[1:] for call in part] for part in (calls[: at[0]], calls[at[0] + 1 :]))
    keys = sum(width for _, width in inward) - heads * size
    _need(all(width == hidden for width, _ in inward) and keys > 0 and keys % (2 * size) == 0)
    _need(len(others) >= 3 and (heads * size, hidden) in others)
    others.remove((heads * size, hidden))
    (ffn, after), up = others[-1], [n for k, n in others[:-1] if k == hidden]
    _need(after == hidden and len(up) == len(others) - 1 and up in ([ffn], [ffn] * 2, [2 * ffn]))
    return tuple({
        "hidden": hidden, "heads": heads, "kv_heads": keys // (2 * size), "head_size": size, "ffn": ffn,
        "gated": sum(up) == 2 * ffn,
    }.items())  # fmt: skip


def _norms(block: nn.Module, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on norms. These are the modules of a block whose parameters all have one dimension."""
    own = [(part, [*part.parameters(recurse=False)]) for part in block.modules()]
    norms = [(part, each) for part, each in own if each and all(tensor.ndim == 1 for tensor in each)]
    widths = [tensors[0].numel() for _, tensors in norms]
    if not norms:
        return {"norm": "unweighted"}
    hidden, size = sizes["hidden"], sizes["head_size"]
    of_heads = [sizes["heads"] * size, sizes["kv_heads"] * size]
    is_whole = {hidden} != {*widths} >= {*of_heads}
    for width in of_heads if is_whole else ():
        widths.remove(width)
    within = [width for width in widths if width != hidden]
    has_biases = any(len(tensors) > 1 for _, tensors in norms)
    is_layer_norm = has_biases or any(isinstance(part, nn.LayerNorm) for part, _ in norms)
    return {
        "norm": "layernorm" if is_layer_norm else "rmsnorm",
        "norm_bias": has_biases or not is_layer_norm,
        "norms_per_layer": widths.count(hidden),
        "qk_norm": "width" if is_whole else within == [size, size],
    }


def _positions(tables: Sequence[Any], vocab: int, hidden: int, seq: int) -> dict[str, Any]:
    """Return the fields on positions: learned if a second table is looked up; otherwise taken for rotary ones."""
    learned = [shape for shape, _ in tables]
    learned.remove((vocab, hidden))
    if not learned:
        return {"positions": "rotary"}
    _need(len(learned) == 1 and learned[0][1] == hidden)
    return {"positions": "learned", "num_positions": 0 if learned[0][0] == seq else learned[0][0]}
