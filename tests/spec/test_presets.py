"""Published models by name, against the counts that their authors print."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec.model import LayerTable, Model, Transformer

EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 335_174_458,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-neo-2.7b": 2_651_307_520,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-176b": 176_247_271_424,
    "falcon-40b": 41_303_293_952,
    "starcoder2-15b": 15_957_889_024,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "command-r": 34_980_831_232,
    "resnet-50": 25_557_032,
}
"""Elements in the released weights; DeepSeek-V3 without its module for multi-token prediction, and Falcon with tied
embeddings."""

MEGATRON = {
    "1.7b": "1.7", "3.6b": "3.6", "7.5b": "7.5", "18.4b": "18.4", "39.1b": "39.1", "76.1b": "76.1",
    "145.6b": "145.6", "310.1b": "310.1", "529.6b": "529.6", "1008b": "1008.0",
}  # fmt: skip
"""SC21, Table 1: billions as printed."""

MPT = {
    ("125m", 1024): 124_525_056, ("125m", 2048): 125_311_488, ("125m", 32768): 148_904_448,
    ("350m", 512): 354_412_544, ("350m", 2048): 355_985_408, ("760m", 2048): 760_470_528,
    ("760m", 16384): 782_490_624, ("1b", 512): 1_312_804_864, ("1b", 8192): 1_328_533_504,
    ("3b", 2048): 2_651_837_440, ("7b", 4096): 6_667_247_616, ("13b", 2048): 12_853_954_560,
    ("13b", 32768): 13_011_240_960, ("30b", 8192): 30_019_254_272, ("70b", 2048): 64_862_437_376,
}  # fmt: skip
"""Parameters by model and sequence length in llm-foundry's benchmark tables."""


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_parameters_are_those_of_the_released_weights(name: str, count: int) -> None:
    assert Model.of(name).num_params == count


@pytest.mark.parametrize(("size", "printed"), MEGATRON.items())
def test_megatrons_sizes_are_those_of_its_table_and_of_its_formula(size: str, printed: str) -> None:
    model = Model.of(f"megatron-{size}")
    assert isinstance(model, Transformer)
    layers, width, vocab, seq = model.layers, model.hidden, model.vocab, model.seq
    formula = 12 * layers * width**2 * (1 + 13 / (12 * width) + (vocab + seq) / (12 * layers * width))
    assert f"{model.num_params / 1e9:.1f}" == f"{formula / 1e9:.1f}" == printed
    assert model.num_params - formula == pytest.approx(
        2 * width, abs=1e-4 * width
    )  # its formula leaves the last norm out


@pytest.mark.parametrize(("key", "count"), MPT.items())
def test_mpt_counts_are_those_printed_at_every_sequence_length(key: tuple[str, int], count: int) -> None:
    size, seq = key
    assert Model.of(f"mpt-{size}").replace(seq=seq).num_params == count


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-175b", 175), ("zero-7.5b", 7.5), ("zero-128b", 128), ("zero-1t", 1000), ("opt-350m", 355)],
)
def test_sizes_that_are_only_printed_rounded_come_within_one_per_cent(name: str, billions: float) -> None:
    scale = 1e6 if name == "opt-350m" else 1e9
    assert Model.of(name).num_params == pytest.approx(billions * scale, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
        ("deepseek-v2", 21),
        ("deepseek-v3", 37),
        ("gpt2", 0.124),
    ],
)
def test_a_token_passes_through_as_many_parameters_as_the_authors_say(name: str, billions: float) -> None:
    model = Model.of(name)
    assert isinstance(model, Transformer)
    assert model.num_active_params == pytest.approx(billions * 1e9, rel=0.02)


def test_the_model_with_56_heads_keeps_them() -> None:
    model = Model.of("mpt-30b")
    assert isinstance(model, Transformer)
    assert (model.heads, model.head_size) == (56, 128)


@pytest.mark.parametrize("name", Model.names())
def test_every_model_has_a_source_and_goes_to_json_and_back(name: str) -> None:
    model = Model.of(name)
    assert model.name == name
    assert len(model.source) > 15
    assert type(model).from_json(model.to_json()) == model
    assert Model.of(name) is model


def test_names_are_found_however_they_are_spelt() -> None:
    assert Model.of("Llama 3.1 405B") is Model.of("llama-3-405b")
    assert Model.of("GPT-3") is Model.of("gpt3-175b")
    assert Model.of("megatron_1T") is Model.of("megatron-1008b")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt5", r"^model='gpt5' is not known; did you mean 'gpt2'\?"),
        ("llama-2", "use llama-2-7b or llama-2-13b or"),
    ],
)
def test_an_unknown_model_is_answered_with_those_near_it(name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Model.of(name)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == 4 * width
        change = (nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Identity() if same else nn.Sequential(*change)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet_50() -> nn.Sequential:
    """He et al., arXiv 1512.03385, Table 1; stride in the 3x3 convolutions."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, 3, bias=False), bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True), maxpool=nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip
    inputs = 64
    for group, (count, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(count):
            parts[f"layer{group}_{block}"] = Bottleneck(inputs, width, 2 if group > 1 and block == 0 else 1)
            inputs = 4 * width
    parts |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(2048, 1000)}
    return nn.Sequential(parts)


def test_the_table_of_resnet_50_is_what_torch_traces() -> None:
    with torch.device("meta"):
        module = resnet_50()
    table, traced = (
        Model.of("resnet-50"),
        Model.from_module(module, torch.zeros(32, 3, 224, 224, device="meta")),
    )
    assert isinstance(table, LayerTable)
    assert table.layers == traced.layers
    assert table.flops / 2 == pytest.approx(4.09e9, rel=1e-3)  # multiply-adds as torchvision prints them


def test_a_model_by_name_needs_neither_torch_nor_plotly() -> None:
    code = "import shardscope, sys; shardscope.Model.of('gpt3-175b'); assert not {'torch', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
