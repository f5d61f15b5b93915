"""Optimizers as a job describes them, without torch."""

from __future__ import annotations

import pytest

from shardscope.errors import SpecError
from shardscope.methods.optimizers.lamb import VARIANTS
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.registry import names


@pytest.mark.parametrize("name", names(Optimizer))
def test_every_name_has_a_learning_rate_and_goes_to_json_and_back(name):
    optimizer = Optimizer(name)
    assert optimizer.lr > 0
    assert Optimizer.from_json(optimizer.to_json()) == optimizer
    assert Optimizer(name, lr=0.5).lr == 0.5


@pytest.mark.parametrize("name", names(Optimizer))
def test_every_default_is_a_value_the_field_takes(name):
    settings = Optimizer(name).settings
    assert Optimizer(name, **settings).settings == settings


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(SpecError, match=r"optimizer='adam' is not known; did you mean 'adamw'\?"):
        Optimizer("adam")
    with pytest.raises(SpecError, match=r"optimizer.variant='nvidia' .* 'nvlamb'\?"):
        Optimizer("lamb", variant="nvidia")


@pytest.mark.parametrize(
    ("name", "setting", "users"),
    [
        ("sgd", {"betas": (0.9, 0.95)}, "adamw or lamb"),
        ("adamw", {"momentum": 0.9}, "lars or nesterov or sgd"),
        ("adamw", {"variant": "apex"}, "lamb"),
        ("lamb", {"trust_coefficient": 0.001}, "lars"),
        ("lars", {"clamp": 10.0}, "lamb"),
        ("sgd", {"nesterov": False}, "lars"),
    ],
)
def test_a_setting_without_effect_is_refused_with_a_way_out(name, setting, users):
    ((field, value),) = setting.items()
    with pytest.raises(SpecError) as caught:
        Optimizer(name, **setting)
    expected = f"optimizer.{field}={value!r} has no effect on {name}; leave it out, or use {users}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("nesterov", {"momentum": 0.0}, "momentum"),
        ("lars", {"momentum": 0.0, "nesterov": True}, "nesterov"),
        ("lars", {"momentum_form": "post", "norm_of": "parts"}, "norm_of"),
        ("sgd", {"lr": 0.0}, "lr"),
        ("sgd", {"lr": float("inf")}, "lr"),
        ("sgd", {"momentum": 1.0}, "momentum"),
        ("lamb", {"betas": (0.9, 1.0)}, "betas"),
        ("lamb", {"clamp": 0}, "clamp"),
        ("lars", {"eps": -1e-8}, "eps"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, settings, field):
    with pytest.raises(SpecError, match=field):
        Optimizer(name, **settings)


def test_a_variant_sets_options_which_can_still_be_given():
    assert Optimizer("lamb", variant="timm").settings["max_grad_norm"] == 1.0
    assert Optimizer("lamb", variant="timm", max_grad_norm="off").settings["max_grad_norm"] == "off"
    assert Optimizer("lamb", variant="timm", adapt_undecayed=True).settings["adapt_undecayed"] is True


def test_variants_differ_except_apex_and_timm():
    distinct = {str(Optimizer("lamb", variant=name).settings | {"variant": ""}) for name in VARIANTS}
    assert len(distinct) == len(VARIANTS) - 1


def test_changing_the_variant_of_a_copy_changes_its_options():
    assert Optimizer("lamb", variant="apex").replace(variant="v3").settings["max_grad_norm"] == "off"
