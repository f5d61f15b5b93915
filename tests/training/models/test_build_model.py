"""Every model of the catalogue: its size, its shapes, its start, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardscope.errors import DataError, SpecError
from shardscope.spec.models import MODELS, CNNConfig, GPTConfig, MLPConfig, ResNetConfig
from shardscope.training.data import GlobalSampler, load_data
from shardscope.training.loss import accuracy, cross_entropy, scores_of
from shardscope.training.models import blocks, build_model, units_of

ODD_CONFIGS = [
    MLPConfig(inputs=12, hidden=7, layers=1, classes=3),
    CNNConfig(in_channels=3, channels=(6, 9), groups=3, classes=4),
    ResNetConfig(in_channels=3, width=8, stages=4, blocks_per_stage=1, classes=5),
    GPTConfig(layers=3, hidden=12, heads=3, vocab=17, seq=5, ffn=20),
]


def example(config):
    if config.reads == "tokens":
        return torch.randint(config.vocab, (2, config.seq))
    return torch.rand(2, 1, 8, 8)


@pytest.mark.parametrize("config", [*MODELS.values(), *ODD_CONFIGS], ids=str)
def test_the_closed_form_counts_every_parameter(config):
    with torch.device("meta"):
        model = build_model(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_params


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt-124m"])
def test_scores_have_the_expected_shape(name):
    config = MODELS[name]
    x = example(config)
    scores = scores_of(build_model(name)(x))
    expected = (*x.shape, config.vocab) if config.reads == "tokens" else (2, 10)
    assert scores.shape == expected


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "gpt-nano"])
def test_a_row_is_computed_alike_alone_and_in_a_batch(name):
    model, x = build_model(name, dtype=torch.float64), example(MODELS[name])
    x = x.double() if x.is_floating_point() else x
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "gpt-nano"])
def test_no_model_depends_on_batch_statistics_or_chance(name):
    forbidden = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    assert not [module for module in build_model(name).modules() if isinstance(module, forbidden)]


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "gpt-nano"])
def test_the_seed_alone_decides_the_weights_at_every_precision(name):
    def build(seed, dtype=None):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build_model(name, dtype=dtype).parameters())

    assert torch.equal(build(3), build(3))
    assert torch.equal(build(3).double(), build(3, torch.float64))
    assert not torch.equal(build(3), build(4))


def test_a_gpt_cannot_see_the_future():
    model = build_model("gpt-nano")
    tokens = example(MODELS["gpt-nano"])
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_a_gpt_starts_as_gpt2_does():
    config = GPTConfig(layers=8, hidden=128, heads=4)
    model = build_model(config)
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].ffn.narrow.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.blocks[0].attention.core.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not model.blocks[0].attention.qkv.bias.any()
    x = torch.randint(256, (8, 64))
    assert cross_entropy(model(x), x.roll(1)).item() == pytest.approx(math.log(256), rel=0.02)


def test_a_gpt_refuses_sequences_beyond_its_positions():
    with pytest.raises(DataError, match="seq=65 is longer than the model.s 64 positions"):
        build_model("gpt-nano")(torch.zeros(1, 65, dtype=torch.int64))


def train(name, data, *, steps, lr, batch):
    torch.manual_seed(0)
    dataset, model = load_data(data), build_model(name)
    sampler = GlobalSampler(len(dataset.train), batch, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        x, y = dataset.train.batch(sampler.indices(step))
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, dataset, losses


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("name", "lr"), [("mlp", 3e-3), ("cnn", 1e-2), ("resnet", 3e-3)])
def test_an_image_model_learns_the_digits(name, lr):
    model, dataset, _ = train(name, "digits", steps=80, lr=lr, batch=64)
    x, y = dataset.test.batch(torch.arange(len(dataset.test)))
    assert accuracy(model(x), y) > 0.9


@pytest.mark.slow
def test_a_gpt_learns_python():
    _, _, losses = train("gpt-nano", "python-source", steps=60, lr=3e-3, batch=16)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(losses[-5:]) / 5 < 3.6


def test_a_callable_of_the_users_makes_the_model():
    assert build_model(lambda: nn.Linear(2, 2), dtype=torch.float64).weight.dtype == torch.float64


def test_a_callable_must_return_a_module():
    with pytest.raises(SpecError, match=r"returned int; return a torch.nn.Module"):
        build_model(lambda: 3)


def test_an_unknown_name_is_refused():
    with pytest.raises(SpecError, match="did you mean 'resnet'"):
        build_model("resnt")


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.act, self.right = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
        self.parts = nn.ModuleDict({"inner": inner, "plain": nn.Linear(2, 2)})
        self.loose = nn.ParameterList([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2),
        (build_model("gpt-nano"), 4),
        (build_model("mlp"), 3),
        (Towers(), 2),
        (Nested(), 3),
        (nn.Linear(2, 2), 1),
    ],
    ids=["sequential", "gpt", "mlp", "children", "nested containers", "leaf"],
)
def test_blocks_are_the_repeated_parts(model, count):
    assert len(blocks(model)) == count


def test_a_container_without_a_forward_pass_is_not_a_unit_of_communication():
    assert [type(unit) for unit in units_of(Nested())] == [nn.Linear, nn.Linear]


def test_a_module_is_copied_and_keeps_its_weights():
    mine = nn.Linear(4, 2)
    built = build_model(mine, dtype=torch.float64)
    assert built is not mine
    assert mine.weight.dtype == torch.float32
    torch.testing.assert_close(built.weight, mine.weight.double())
