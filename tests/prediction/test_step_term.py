"""The explanation of a step: its parts add up to the total because each is right; none is what the others leave."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._plain import Plain, rows_of
from prediction.test_step import CALIBRATION, CLUSTER, MODEL, SPARSE, layouts
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.terms import Term
from shardscope.planner.setting import SearchSettings
from shardscope.prediction.step import StepParts, step_time, tables, term, time_term
from shardscope.prediction.step.step import Computing
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

PLAIN = Plain(SearchSettings(MODEL, CLUSTER, CALIBRATION))
SLOW_HOST = CLUSTER.replace(device=CLUSTER.device.replace(host_bandwidth=1e8))
EVERY_PART = Layout(
    data=4, tensor=2, pipeline=4, context=2, expert=2, global_batch=32, zero=2, recompute="full", offload="activations"
)  # fmt: skip
"""Each part of this layout's step takes time, for the sparse model over a slow link to the host."""


def leaves(tree: Term) -> float:
    return sum(each.value for each in tree.walk() if not each.parts)


def off(tree: Term) -> float:
    """The largest relative difference between a term and its parts."""
    inner = [each for each in tree.walk() if each.parts]
    return max(abs(sum(part.value for part in each.parts) / each.value - 1) for each in inner)


def by_hand(layout: Layout) -> float:
    """Seconds of a step by a plain loop over scalars, which shares no line with the toolkit's."""
    (row,) = rows_of(Layouts.of([layout]))
    return PLAIN.time(row, PLAIN.memory(row)[1])


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_the_leaves_add_up_to_the_step_that_a_plain_loop_counts(layout: Layout) -> None:
    assert leaves(time_term(MODEL, layout, CLUSTER, CALIBRATION)) == pytest.approx(by_hand(layout), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(layouts, st.sampled_from([MODEL, SPARSE]))
def test_every_term_is_the_sum_of_its_parts(layout: Layout, model: Transformer) -> None:
    tree = time_term(model, layout, CLUSTER, CALIBRATION)
    assert off(tree) < 1e-12
    assert tree.value == float(step_time(model, Layouts.of([layout]), CLUSTER, CALIBRATION).total[0])


def test_the_term_of_gradients_names_the_shard_and_how_its_replicas_are_reduced() -> None:
    def shown(shard: int) -> Term:
        layout = Layout(data=16, zero=3, shard=shard, global_batch=64)
        return time_term(MODEL, layout, Cluster.of("a100-80gb", nodes=2), CALIBRATION)[
            term.NAMES["data_comm"]
        ]

    assert shown(8).inputs["shard"] == 8
    assert "all-reduce between shards" in shown(8).formula
    for whole in (0, 16):
        assert "shard" not in shown(whole).inputs
        assert "all-reduce between shards" not in shown(whole).formula


def test_every_term_is_the_sum_of_its_parts_on_a_mixed_cluster() -> None:
    cluster = Cluster.mixed(Cluster.of("a100-80gb", nodes=1), Cluster.of("h100-80gb", nodes=1))
    layout = Layout(data=4, tensor=2, pipeline=2, global_batch=64, schedule="1f1b")
    assert off(time_term(MODEL, layout, cluster, CALIBRATION)) < 1e-12


@pytest.mark.parametrize("field", [*StepParts._fields[:-1], *Computing._fields])
def test_a_part_that_is_reported_too_small_does_not_go_unseen(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(*arguments: object) -> term.StepDetail:
        found = honest(*arguments)
        which = "parts" if field in StepParts._fields else "computing"
        share = getattr(getattr(found, which), field)
        assert share[0] > 0
        return found._replace(**{which: getattr(found, which)._replace(**{field: share / 10})})

    honest = term.step_detail
    assert off(time_term(SPARSE, EVERY_PART, SLOW_HOST, CALIBRATION)) < 1e-12
    monkeypatch.setattr(term, "step_detail", tampered)
    assert off(time_term(SPARSE, EVERY_PART, SLOW_HOST, CALIBRATION)) > 1e-6


@pytest.mark.parametrize(
    "column",
    [
        "compute", "forward compute", "backward compute", "edge compute", "recompute", "tensor", "edge tensor",
        "context", "forward", "weight", "input", "near hop", "far hop", "saved",
    ],
)  # fmt: skip
def test_a_wrong_time_of_a_micro_batch_breaks_a_sum(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either a total is no longer that of its parts, or the leaves are no longer those of the plain loop."""
    near = Layout(data=1, tensor=2, pipeline=2, context=2, zero=0, recompute="full", offload="all")
    layout = near if column == "near hop" else near.replace(data=8, global_batch=32)

    def broken() -> float:
        tree = time_term(MODEL, layout, SLOW_HOST, CALIBRATION)
        plain = Plain(SearchSettings(MODEL, SLOW_HOST, CALIBRATION))
        (row,) = rows_of(Layouts.of([layout]))
        return max(off(tree), abs(leaves(tree) / plain.time(row, plain.memory(row)[1]) - 1))

    honest = tables._micro_columns
    assert broken() < 1e-12
    monkeypatch.setattr(
        tables, "_micro_columns", lambda *times: {**(found := honest(*times)), column: found[column] / 10}
    )
    assert broken() > 1e-9
