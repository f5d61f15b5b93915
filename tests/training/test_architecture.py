"""A module that is a transformer is recognised as the one that its configuration describes, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from shardscope.spec.model import LayerTable, Transformer
from shardscope.spec.models import MODELS, GPTConfig
from shardscope.training.models import build_model

GPTS = [name for name, config in MODELS.items() if isinstance(config, GPTConfig) and config.mixture is None]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 130, "max_position_embeddings": 50, "attention_dropout": 0.0,
}  # fmt: skip
GPT2 = {
    "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 33, "attn_pdrop": 0.0,
}  # fmt: skip
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "opt": {**SIZES, "ffn_dim": 100, "word_embed_proj_dim": 64},
    "gpt_neox": SIZES,
    "phi": SIZES,
    "llama": SIZES,
    "llama, tied": {**SIZES, "tie_word_embeddings": True, "head_dim": 24},
    "llama, biased": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "mistral": {**SIZES, "sliding_window": None},
    "gemma": {**SIZES, "head_dim": 32},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 24},
    "olmo2": SIZES,
    "gpt2, with dropout": {**GPT2, "attn_pdrop": 0.1},
}
ANSWERED = (
    "layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "seq", "gated", "tied", "norm",
    "window", "num_params", "layer_params", "embedding_params", "head_params",
)  # fmt: skip


def traced(module: nn.Module, *, seq: int, samples: int = 2) -> LayerTable:
    return ss.Model.from_module(module, torch.zeros(samples, seq, dtype=torch.int64))


@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_of_the_catalogue_is_recognised_as_itself(name: str) -> None:
    config = MODELS[name]
    assert isinstance(config, GPTConfig)
    with torch.device("meta"):
        module = build_model(name)
    assert traced(module, seq=config.seq).as_transformer == config.transformer("GPT")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_module_of_transformers_is_recognised_as_its_config_says(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    keys = {"model_type": name.split(",", maxsplit=1)[0], **HUGGING_FACE[name]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = transformers.AutoConfig.for_model(**keys)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    said = ss.Model.from_hf(tmp_path)
    found = traced(module, seq=said.seq).as_transformer
    assert found is not None
    assert [getattr(found, each) for each in ANSWERED] == [getattr(said, each) for each in ANSWERED]


class Block(nn.Module):
    """A block whose parts can be replaced, to make models that are no transformer of equal blocks."""

    def __init__(self, *, ffn: int = 64, heads: int = 4, fused: bool = True, again: bool = False) -> None:
        super().__init__()
        self.heads, self.fused, self.again = heads, fused, again
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, ffn), nn.Linear(ffn, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.one(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = (query @ key.transpose(2, 3)).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.down(functional.gelu(self.up(self.two(x))))
        return x + (self.down(functional.gelu(self.up(y))) if self.again else y)


class Decoder(nn.Module):
    """Embedding, blocks and an output projection."""

    def __init__(
        self,
        *blocks: nn.Module,
        first: nn.Module | None = None,
        extra: nn.Module | None = None,
        classes: int = 50,
    ) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(50, 32), nn.ModuleList(blocks)
        self.first, self.extra, self.head = first, extra, nn.Linear(32, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) if self.first is None else self.first(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x if self.extra is None else self.extra(x))
        return scores


class Positions(nn.Module):
    """Positions as a parameter, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 20, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]]


class Encoder(nn.Module):
    """Torch's own layers, with their dropout; sequences come first if `is_batch_first` is false."""

    def __init__(self, *, is_batch_first: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=is_batch_first)
        self.tokens, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.encoder, self.is_batch_first = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            is_batch_first,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.tokens(tokens if self.is_batch_first else tokens.T))
        scores: Tensor = self.head(x)
        return scores


@pytest.mark.parametrize(
    ("make", "positions"),
    [
        (Encoder, "rotary"),
        (lambda: Encoder(is_batch_first=False, dropout=0.0), "rotary"),
        (lambda: Decoder(Block(), Block(), first=Positions()), "learned"),
        (lambda: nn.Sequential(Decoder(Block(), Block())), "rotary"),
        (lambda: nn.Sequential(nn.Embedding(50, 32), Block(), Block(), nn.Linear(32, 50)), "rotary"),
    ],
)
def test_other_ways_to_write_one_are_recognised(make: Callable[[], nn.Module], positions: str) -> None:
    found = traced(make(), seq=16).as_transformer
    assert found is not None
    assert (found.layers, found.hidden, found.ffn, found.seq, found.positions) == (2, 32, 64, 16, positions)


def test_a_module_of_ones_own_is_recognised() -> None:
    found = traced(Decoder(Block(), Block()), seq=16).as_transformer
    assert found is not None
    assert (found.layers, found.heads, found.ffn, found.tied, found.bias) == (2, 4, 64, False, True)


class Scan(nn.Module):
    """Work without products, one token after the other."""

    def forward(self, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for at in range(1, 4 * x.shape[1]):
            states.append(0.9 * states[-1] + x[:, at % x.shape[1]])
        return torch.stack(states[: x.shape[1]], 1)


class Halves(nn.Module):
    """Sequences cut into halves, as more samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1)).flatten(0, 1)


class OtherAttention(Block):
    """Attention over other keys: four times as many, a window of them, or with a gate."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.one(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None
        if self.kind == "more":
            key, value = (torch.cat([each] * 4, 2) for each in (key, value))
        else:
            size = x.shape[1]
            mask = torch.ones(size, size, dtype=torch.bool, device=x.device).tril().triu(-3)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.two(x))))


class ZeroDim(nn.Module):
    """A list of layers, and a lookup of a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kinds = nn.ModuleList([nn.Linear(16, 16)] * 2), nn.Embedding(3, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float() + self.kinds(torch.tensor(1, device=tokens.device))
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Conditional(nn.Module):
    """An operator of higher order."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cond(torch.tensor(data=True), lambda x: x.sin(), lambda x: x.cos(), (self.tokens(tokens),))
        scores: Tensor = self.head(x)
        return scores


def frozen() -> nn.Module:
    model = Decoder(Block(), Block())
    model.tokens.weight.requires_grad_(requires_grad=False)
    return model


def shared() -> nn.Module:
    block = Block()
    return Decoder(block, block)


@pytest.mark.parametrize(
    "make",
    [
        frozen,
        shared,
        ZeroDim,
        Conditional,
        lambda: Decoder(Block(), Block(), first=Scan()),
        lambda: Decoder(Block(), Block(), first=Halves()),
        lambda: Decoder(OtherAttention("more"), OtherAttention("more")),
        lambda: Decoder(OtherAttention("window"), OtherAttention("window")),
        lambda: Decoder(Block(), Block(ffn=128)),
        lambda: Decoder(Block(), Block(heads=2)),
        lambda: Decoder(Block(fused=False), Block(fused=False)),
        lambda: Decoder(Block(again=True), Block(again=True)),
        lambda: Decoder(Block(), nn.Linear(32, 32)),
        lambda: Decoder(Block(), Block(), extra=nn.Linear(32, 32)),
        lambda: Decoder(Block(), Block(), extra=nn.Conv1d(16, 16, 1)),
        lambda: Decoder(Block(), Block(), classes=10),
        Decoder,
    ],
)
def test_what_the_formulas_would_not_describe_is_not_recognised(make: Callable[[], nn.Module]) -> None:
    assert traced(make(), seq=16).as_transformer is None


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet"])
def test_an_image_model_is_not_a_transformer(name: str) -> None:
    module = build_model(name)
    assert ss.Model.from_module(module, torch.zeros(2, 1, 8, 8)).as_transformer is None


def test_a_traced_module_can_be_planned_predicted_and_simulated_as_its_transformer() -> None:
    table = traced(Decoder(Block(), Block()), seq=16)
    model, cluster = table.as_transformer, ss.Cluster.of("a100-80gb", per_node=4)
    assert isinstance(model, Transformer)
    layout = ss.Layout(data=4, global_batch=8, micro_batch=2)
    assert ss.predict(table, cluster, layout).step_time_s == ss.predict(model, cluster, layout).step_time_s
    assert ss.simulate(table, cluster, layout).step_time_s == ss.simulate(model, cluster, layout).step_time_s
    assert repr(ss.plan(table, cluster, global_batch=8)) == repr(ss.plan(model, cluster, global_batch=8))
