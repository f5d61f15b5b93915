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
from shardscope.methods.strategies.mesh import Mesh
from shardscope.spec.units import seconds_text

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
    """A model whose routers hardly learn; each prefers other experts, and late ones more so."""
    import torch

    from shardscope.spec.mixture import RoutedMixture
    from shardscope.spec.models import GPTConfig
    from shardscope.training.models import build_model
    from shardscope.training.models.mixture import experts_of

    mixture = RoutedMixture(experts=8, active=2, ffn=256, balance=0, router_bias=True)
    model, preferred = build_model(GPTConfig(layers=4, hidden=64, heads=4, mixture=mixture)), [1.5, 1.0, 0.5]
    with torch.no_grad():
        for number, (_, layer) in enumerate(experts_of(model)):
            layer.router.bias.copy_(
                torch.tensor([*preferred, *[0.0] * 5]).roll(2 * number) * (0.3 + 0.3 * number)
            )
    return model


def mesh(expert: int = 2, schedule: str | None = None, **settings: Any) -> Mesh:
    if schedule is None:
        return Mesh(expert=expert, **settings)
    virtual = 2 if schedule == "interleaved" else 1
    stages = ss.Pipeline(schedule=schedule, virtual_stages=virtual, split="even")
    return Mesh(expert=expert, pipeline=2, stages=stages, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "strategy", "recompute"),
    [
        (4, mesh(schedule="1f1b"), "none"),
        pytest.param(4, mesh(), "none", marks=pytest.mark.weekly),
        pytest.param(4, mesh(4), "none", marks=pytest.mark.weekly),
        pytest.param(4, mesh(schedule="interleaved", data="zero-1"), "none", marks=pytest.mark.weekly),
        pytest.param(4, mesh(schedule="zb-h1"), "none", marks=pytest.mark.weekly),
        pytest.param(8, mesh(schedule="gpipe"), "full", marks=pytest.mark.weekly),
        pytest.param(8, mesh(4, schedule="1f1b", data="zero-1"), "none", marks=pytest.mark.weekly),
    ],
    ids=lambda value: f"{value.label}-{value.stages.label}" if isinstance(value, Mesh) else str(value),
)
def test_a_step_with_skewed_routers_takes_as_long_as_predicted_from_its_recorded_loads(
    world_size: int, strategy: Mesh, recompute: str
) -> None:
    """On a short text: an evaluation takes emulated ranks as long as many steps."""
    needs_namespaces()
    rate = f"{800 // world_size} MFLOP/s"  # slow, so that waits for this machine's cores hardly count
    cluster = ss.Cluster.emulated(
        world_size // 2, "100 Mbit/s", per_node=2, flops=rate, memory_bandwidth="2 GB/s"
    )
    job = ss.Job(
        model=skewed_model, data=SHORT_TEXT, strategy=strategy, world_size=world_size, recompute=recompute, steps=4,
        batch=ss.Batch(2 * world_size, micro_batch=2), eval_every=None, optimizer=ss.Optimizer("adamw", lr=1e-6),
    )  # fmt: skip
    run = ss.launch(job, cluster).wait(180)
    measured = min(run.metrics()["step_time_s"][1:])  # other programs only make steps longer
    usual = ss.predict(job, cluster).step_time_s
    found = ss.predict(job, cluster, expert_loads=run.reduced().experts.loads)
    simulated = ss.simulate.predicted(found).step_time_s
    print(f"measured {measured:.3f} s, predicted {found.step_time_s:.3f} s, simulated {simulated:.3f} s, "
          f"with an even load {usual:.3f} s")  # fmt: skip
    assert found.step_time_s == pytest.approx(measured, rel=0.1)
    assert simulated == pytest.approx(measured, rel=0.1)
    assert usual < 0.85 * measured
    (told,) = [note for note in ss.compare(run).notes if "run's own load, a step" in note]
    assert seconds_text(found.step_time_s) in told
