"""Layers with more or fewer norms, and windows of attention, against real layers and counted masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from shardscope.analytic.compute import flops, work
from shardscope.analytic.memory.activations import activation_bytes_per_layer
from shardscope.analytic.memory.frameworks import FRAMEWORKS
from shardscope.analytic.memory.states import known_recipe
from shardscope.spec.model import Transformer

SIZES: dict[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 512,
    "vocab": 64,
    "seq": 96,
}


class Layer(nn.Module):
    """A layer as a Transformer describes it, with LayerNorm, rotary positions left out, and GELU."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, width, keys = model, model.heads * model.head_size, model.kv_heads * model.head_size
        self.norms = nn.ModuleList(nn.LayerNorm(model.hidden) for _ in range(model.norms_per_layer))
        shape = (model.head_size,)
        self.head_norms = nn.ModuleList(nn.LayerNorm(shape) for _ in range(2 * bool(model.qk_norm)))
        self.qkv, self.out = nn.Linear(model.hidden, width + 2 * keys), nn.Linear(width, model.hidden)
        self.up, self.down = nn.Linear(model.hidden, model.ffn), nn.Linear(model.ffn, model.hidden)

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.model.head_size)).transpose(1, 2)
        groups = (self.model.heads, self.model.kv_heads, self.model.kv_heads)
        query, key, value = (each.contiguous() for each in heads.split(groups, dim=1))
        if self.model.qk_norm:
            query, key = (norm(each) for norm, each in zip(self.head_norms, (query, key), strict=True))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        norms = self.norms
        if len(norms) == 1:
            normed = norms[0](x)
            return x + self.attention(normed) + self.feed_forward(normed)
        after = norms[2:] or (nn.Identity(), nn.Identity())
        x = x + after[0](self.attention(norms[0](x)))
        return x + after[1](self.feed_forward(norms[1](x)))


def saved_bytes(model: Transformer) -> int:
    layer, held = Layer(model), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = layer(torch.randn(1, model.seq, model.hidden, requires_grad=True)).sum()
    assert loss.requires_grad  # tensors are still alive, so that no address was used twice
    return sum(storage.nbytes() for address, storage in held.items() if address not in own)


@pytest.mark.parametrize(
    "fields", [{"norms_per_layer": 1}, {"norms_per_layer": 4}, {"qk_norm": True}], ids=str
)
def test_norms_change_what_a_layer_saves_as_in_torch(fields: dict[str, Any]) -> None:
    usual, other = Transformer(**SIZES), Transformer(**SIZES, **fields)
    predicted = [
        float(
            activation_bytes_per_layer(
                model, flash_attention=True, recipe=known_recipe("fp32"), framework=FRAMEWORKS["fsdp2"]
            )
        )
        for model in (usual, other)
    ]
    measured = [saved_bytes(model) for model in (usual, other)]
    assert predicted[1] - predicted[0] == pytest.approx(measured[1] - measured[0], rel=0.03)


@pytest.mark.parametrize(("window", "every"), [(8, 0), (32, 2), (64, 3), (96, 0), (500, 0), (0, 0)])
def test_the_counted_scores_are_twice_those_that_the_masks_leave(window: int, every: int) -> None:
    model = Transformer(**SIZES, window=window, full_attention_every=every)
    left = 0
    for layer in range(1, model.layers + 1):
        causal = torch.ones(model.seq, model.seq, dtype=torch.bool).tril()
        is_full = not window or (every and layer % every == 0)
        left += int((causal if is_full else causal & ~causal.tril(-window)).sum())
    diagonal = sum(
        min(model.seq, window or model.seq) if layer % (every or 99) else model.seq for layer in range(1, 5)
    )
    assert work.attended_tokens(model) * model.seq * model.layers == pytest.approx(2 * left - diagonal)


def test_a_window_saves_time_only_where_one_kernel_computes_attention() -> None:
    whole = ss.Model.of("llama-3-8b")
    windowed = whole.replace(window=1024, full_attention_every=4)
    cluster = ss.Cluster.of("h100-80gb", nodes=1, per_node=8)
    layout = ss.Layout(data=8, zero=3, global_batch=8)
    seconds = {
        (model.window, flash): ss.predict(model, cluster, layout.replace(flash_attention=flash)).step_time_s
        for model in (whole, windowed)
        for flash in (True, False)
    }
    assert seconds[1024, True] < seconds[0, True]
    assert seconds[1024, False] == seconds[0, False]
    assert flops.model_flops(windowed, 1) < flops.model_flops(whole, 1)
    assert ss.predict(windowed, cluster, layout).peak_bytes == ss.predict(whole, cluster, layout).peak_bytes
