# ruff: noqa: E501
"""Public architectures, built small: FLOPs beside a count by hand, and the peak of a step beside the allocator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.allocator import peaks

transformers = pytest.importorskip("transformers")
SAMPLES, SEQ, WIDTH, LAYERS, HEADS = 4, 64, 64, 2, 4
TOKENS = torch.randint(100, (SAMPLES, SEQ))
IMAGES = torch.rand(SAMPLES, 3, 64, 64)
SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 128,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def pairs(layers: int, queries: int, keys: int, width: int = WIDTH) -> int:
    """Multiply-adds of attention without its projections: scores, and weighted values."""
    return 2 * SAMPLES * layers * queries * keys * width


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = (
            nn.Embedding(100, WIDTH),
            nn.LSTM(WIDTH, 96, num_layers=2, batch_first=True),
        )
        self.head = nn.Linear(96, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def convolutions(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
        nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(3, 16), convolutions(16, 32)])
        self.middle, self.last = convolutions(32, 64), nn.Conv2d(16, 2, 1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.joined = nn.ModuleList([convolutions(64, 32), convolutions(32, 16)])

    def forward(self, rows: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            rows = block(rows)
            kept.append(rows)
            rows = nn.functional.max_pool2d(rows, 2)
        rows = self.middle(rows)
        for up, block in zip(self.up, self.joined, strict=True):
            rows = block(torch.cat([kept.pop(), up(rows)], dim=1))
        return self.last(rows)


def of(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{kind.removesuffix('Model')}Config")
    return lambda: getattr(transformers, kind)(config(**fields))


LSTM = SAMPLES * SEQ * 4 * 96 * (WIDTH + 96 + 96 + 96)
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor] | tuple[Tensor, ...], int]] = {
    "LSTM": (LanguageModel, (TOKENS,), LSTM),
    "U-Net": (UNet, (IMAGES,), 0),
    "BERT": (of("BertModel", vocab_size=100, **SMALL, **NO_DROPOUT), {"input_ids": TOKENS}, pairs(LAYERS, SEQ, SEQ)),
    "GPT-2": (
        of("GPT2Model", vocab_size=100, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0),
        {"input_ids": TOKENS}, pairs(LAYERS, SEQ, SEQ),
    ),
    "Llama": (
        of("LlamaModel", vocab_size=100, num_key_value_heads=2, **SMALL), {"input_ids": TOKENS}, pairs(LAYERS, SEQ, SEQ)
    ),
    "Mixtral": (  # its other implementations of experts do not run on shapes in float32
        of("MixtralModel", vocab_size=100, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
           experts_implementation="batched_mm", **SMALL),
        {"input_ids": TOKENS}, pairs(LAYERS, SEQ, SEQ) + SAMPLES * SEQ * LAYERS * (4 * WIDTH + 2 * 3 * WIDTH * 128),
    ),
    "T5": (
        of("T5Model", vocab_size=100, d_model=WIDTH, d_kv=16, d_ff=128, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0),
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS}, 3 * pairs(LAYERS, SEQ, SEQ),
    ),
    "ViT": (of("ViTModel", image_size=64, patch_size=8, **SMALL, **NO_DROPOUT), {"pixel_values": IMAGES}, pairs(LAYERS, 65, 65)),
    "ConvNeXt": (of("ConvNextModel", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2), {"pixel_values": IMAGES}, 0),
    "ResNet": (
        of("ResNetModel", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"), {"pixel_values": IMAGES}, 0
    ),
    "Wav2Vec2": (
        of("Wav2Vec2Model", conv_dim=[32, 32], conv_kernel=[10, 3], conv_stride=[5, 2], num_feat_extract_layers=2,
           num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, hidden_dropout=0, attention_dropout=0,
           feat_proj_dropout=0, activation_dropout=0, layerdrop=0, mask_time_prob=0, **SMALL),
        {"input_values": torch.rand(SAMPLES, 1000)}, pairs(LAYERS, 99, 99),
    ),
}  # fmt: skip


def counted_by_layer(module: nn.Module, inputs: Any) -> int:
    """Multiply-adds of dense layers and convolutions in a real forward pass, each by its definition."""
    found = 0

    def count(layer: Any, given: Any, output: Any) -> None:
        nonlocal found
        if isinstance(layer, nn.Linear):
            found += given[0].numel() * layer.out_features
        elif type(layer).__name__ == "Conv1D":  # GPT-2's name for a dense layer
            found += given[0].numel() * layer.nf
        elif isinstance(layer, nn.ConvTranspose2d):
            found += given[0].numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.Conv1d | nn.Conv2d):
            found += output.numel() * layer.weight[0].numel()

    hooks = [layer.register_forward_hook(count) for layer in module.modules()]
    with torch.no_grad():
        module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_and_peak_of_an_architecture_are_those_of_a_real_step(name: str) -> None:
    make, inputs, others = ARCHITECTURES[name]
    torch.manual_seed(0)
    module = make().train()
    products = counted_by_layer(module, inputs) + others
    found = peaks(module, inputs)
    assert found.table.flops * SAMPLES == pytest.approx(2 * products, rel=0.01)
    assert found.ratio == pytest.approx(1, abs=0.02)
    assert found.table.notes == ()
