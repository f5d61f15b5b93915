"""Ranks with different experts, of which some get more tokens: a step waits for the fullest rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import SHORT_TEXT
from shardscope.analytic.communication.experts import all_to_alls

EXPERTS, LAYERS = 8, 4
SKEWED = (0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05)
LAYOUT = ss.Layout(data=4, expert=4, micro_batch=4, global_batch=16)
CLUSTER = ss.Cluster.emulated(2, "50 Mbit/s", per_node=2, flops="400 MFLOP/s", memory_bandwidth="2 GB/s")


def predicted(loads: Any = None, **settings: Any) -> Any:
    job = ss.Job(model="moe-nano", data="python-source", layout=LAYOUT, **settings)
    return ss.predict(job, CLUSTER, expert_loads=loads)


def test_an_even_load_is_the_usual_prediction() -> None:
    even = [[1 / EXPERTS] * EXPERTS]
    assert predicted(even).step_time_s == pytest.approx(predicted().step_time_s, rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_passes_take_as_long_as_on_the_rank_with_the_fullest_experts(recompute: str) -> None:
    usual, skewed = predicted(recompute=recompute), predicted([SKEWED], recompute=recompute)
    choices = 4 * 64 * 2  # of a micro-batch of a rank: samples, tokens, experts of a token
    of_choice = 2 * 2 * 64 * 128  # FLOPs of the two products of an expert
    extra = LAYERS * (4 * (0.3 + 0.2) - 1) * choices * of_choice / 400e6
    for phase, passes in (("forward", 1), ("backward", 3 if recompute == "full" else 2)):
        assert skewed.time[phase].value - usual.time[phase].value == pytest.approx(passes * extra, rel=1e-6)
    assert skewed.time["optimizer"].value == usual.time["optimizer"].value


def test_ranks_wait_for_the_fullest_experts_of_each_layer() -> None:
    """If the fullest experts of each layer are on another rank, passes take as long as if they were on one rank."""
    turned = [SKEWED[-2 * layer :] + SKEWED[: -2 * layer] if layer else SKEWED for layer in range(LAYERS)]
    one, other = predicted([SKEWED]), predicted(turned)
    for phase in ("forward", "backward"):
        assert other.time[phase].value == pytest.approx(one.time[phase].value, rel=1e-12)


def test_all_to_alls_take_as_long_as_on_the_busiest_link() -> None:
    """Ranks 0 and 1 are on a node, which receives what the other node sends to its experts, or sends as much."""
    loads = np.tile(np.rint(np.array(SKEWED) * 512), (4, 1))
    each = all_to_alls(loads, hidden=64, element_bytes=4)
    crossing = sum(max(part[:2, 2:].sum(), part[2:, :2].sum()) for part in each)
    term = predicted([SKEWED]).time["communication"]["expert:all_to_all"]
    assert term.inputs["bytes"] * 1.001 >= LAYERS * crossing * 0.5
    assert term.value >= LAYERS * crossing / term.inputs["bandwidth"]
    assert term.value > predicted().time["communication"]["expert:all_to_all"].value


@pytest.mark.parametrize(
    ("model", "layout", "loads", "told"),
    [
        ("moe-nano", ss.Layout(data=4), [SKEWED], "no effect on a job without an expert axis"),
        (
            "moe-nano",
            LAYOUT,
            [SKEWED] * 3,
            "expert_loads has 3 rows of [8] numbers, but the model has 4 layers of 8",
        ),
        ("moe-nano", LAYOUT, [SKEWED[:4]], "1 rows of [4] numbers"),
        ("moe-nano", LAYOUT, list(SKEWED), "is not a list of rows of numbers"),
        ("moe-nano", LAYOUT, [[3, 1, 0, 0, 0, 0, 0, 0]], "are not fractions of all choices"),
    ],
)
def test_loads_that_do_not_fit_are_refused(model: str, layout: ss.Layout, loads: Any, told: str) -> None:
    job = ss.Job(model=model, data="python-source", layout=layout)
    with pytest.raises(ss.SpecError) as refused:
        ss.predict(job, expert_loads=loads)
    assert told in str(refused.value)


def skewed_model() -> nn.Module:
    """A model whose routers prefer the first experts, and hardly learn."""
    import torch

    from shardscope.spec.mixture import RoutedMixture
    from shardscope.spec.models import GPTConfig
    from shardscope.training.models import build_model
    from shardscope.training.models.mixture import experts_of

    mixture = RoutedMixture(experts=8, active=2, ffn=256, balance=0, router_bias=True)
    model = build_model(GPTConfig(layers=2, hidden=64, heads=4, mixture=mixture))
    with torch.no_grad():
        for _, layer in experts_of(model):
            layer.router.bias.copy_(torch.tensor([1.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]))
    return model


@pytest.mark.slow
def test_a_step_with_a_skewed_router_takes_as_long_as_predicted_from_its_recorded_loads() -> None:
    """On a short text: an evaluation takes emulated ranks as long as many steps."""
    needs_namespaces()
    job = ss.Job(
        model=skewed_model, data=SHORT_TEXT, layout=LAYOUT, steps=6, eval_every=None,
        optimizer=ss.Optimizer("adamw", lr=1e-6),
    )  # fmt: skip
    run = ss.launch(job, CLUSTER).wait(120)
    measured = min(run.metrics()["step_time_s"][1:])  # other programs only make steps longer
    usual = ss.predict(job, CLUSTER).step_time_s
    found = ss.predict(job, CLUSTER, expert_loads=run.reduced().experts.loads).step_time_s
    print(f"measured {measured:.3f} s, predicted {found:.3f} s, with an even load {usual:.3f} s")
    assert found == pytest.approx(measured, rel=0.1)
    assert usual < 0.85 * measured
