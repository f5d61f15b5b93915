"""The catalogue of models, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardscope.errors import SpecError
from shardscope.spec.models import MODELS, CNNConfig, GPTConfig, ResNetConfig, model_config


def test_gpt_124m_has_the_published_parameter_count():
    assert MODELS["gpt-124m"].num_params == 124_439_808


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt-nano", 0.2), ("gpt-micro", 0.8), ("gpt-mini", 3), ("gpt-small", 10), ("gpt-25m", 25)],
)
def test_a_gpt_is_as_large_as_its_description(name, millions):
    assert MODELS[name].num_params == pytest.approx(millions * 1e6, rel=0.15)


def test_only_the_gpts_read_tokens_with_experts_or_without():
    assert {name for name, config in MODELS.items() if config.reads == "tokens"} == {
        name for name in MODELS if name.startswith(("gpt-", "moe-", "switch-"))
    }


def test_an_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(SpecError, match=r"model='gpt-mino' is not known; did you mean 'gpt-mini'\?"):
        model_config("gpt-mino")


def test_a_config_survives_json():
    config = GPTConfig(layers=2, hidden=32, heads=4, ffn=96)
    assert GPTConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPTConfig(layers=1, hidden=10, heads=4),
            "heads=4 does not divide hidden=10; use one of 1, 2, 5, 10",
        ),
        (lambda: CNNConfig(channels=(8, 6)), "groups=4 does not divide channels=6; use one of 1, 2, 3, 6"),
        (lambda: CNNConfig(channels=()), "gives a model without layers"),
        (lambda: ResNetConfig(width=6), "groups=4 does not divide width=6"),
        (lambda: GPTConfig(layers=0, hidden=8, heads=2), "layers=0 is not valid"),
    ],
)
def test_an_impossible_shape_is_refused_in_a_sentence(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_the_catalogues_load_without_torch():
    code = "import sys, shardscope.spec.models, shardscope.spec.data; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
