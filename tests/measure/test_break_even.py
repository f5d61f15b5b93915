"""What compressing is worth for a job: measured codecs, counted bytes, and what is refused."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.measure.break_even import gradient_shapes
from shardscope.measure.codecs import codec_seconds
from shardscope.spec.models import MODELS

JOB = ss.Job(model="mlp", data="digits", world_size=2)


def test_shapes_are_those_of_the_models_own_parameters() -> None:
    shapes = gradient_shapes(JOB)
    elements = [1 for _ in range(len(shapes))]
    for index, shape in enumerate(shapes):
        for size in shape:
            elements[index] *= size
    assert sum(elements) == MODELS["mlp"].num_params


def test_packing_takes_time_and_nothing_takes_none() -> None:
    shapes = [(256, 256)]
    assert codec_seconds(JOB, shapes) == 0
    once = codec_seconds(JOB.replace(compression="int8"), shapes, repeats=3)
    assert 0 < once < 1


def test_a_large_model_is_packed_in_part_and_scaled_up() -> None:
    shapes = [(4096, 4096)] * 3
    whole = codec_seconds(JOB.replace(compression="bf16"), shapes, repeats=1)
    assert whole > codec_seconds(JOB.replace(compression="bf16"), [(512, 512)], repeats=1)


def test_break_even_has_a_row_a_method_and_workers_and_names_the_best_way() -> None:
    found = ss.break_even(
        JOB, methods=["bf16", ss.Compression("topk", ratio=0.05)], workers=(2, 4), repeats=1
    )
    frame = found.to_frame()
    assert list(frame["method"].unique()) == ["bf16", "topk ratio=0.05"]
    assert list(frame["workers"]) == [2, 4, 2, 4]
    slow, times = found.best(4, 1e3)
    assert slow.name == "topk"
    assert times > 2
    assert found.best(4, 1e30) == (ss.Compression(), 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": (1, 2)}, "workers=1 exchange nothing; take 2 or more"),
        ({"methods": ["zip"]}, "compression='zip' is not known"),
        ({"methods": ["local-sgd"]}, "compression='local-sgd' exchanges different things at different steps"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ss.SpecError, match=message):
        ss.break_even(JOB, **change)


def test_a_verdict_is_said_before_anything_compressed_has_run() -> None:
    slow = ss.worth(JOB, methods=["int8", "topk"], link=ss.Link(bandwidth="1 Mbit/s", latency="1 ms"))
    assert slow.best.compression.is_on
    assert slow.verdict.startswith("On a link of 1 Mbit/s, 1 ms compressing pays: with ")
    assert [run.name for run in ss.runs()] == ["probe"]
    quick = ss.worth(
        JOB, methods=["int8"], link=ss.Link(bandwidth="1000 Gbit/s", latency=0.0), probe=ss.runs()[0]
    )
    assert not quick.pays
    assert "does not pay" in quick.verdict
    assert list(slow.to_frame().columns)[:2] == ["method", "step_s"]


def test_only_rings_and_all_reduces_of_several_ranks_are_predicted() -> None:
    with pytest.raises(ss.SpecError, match="strategy='zero-3' on world_size=2 is not one whose compression"):
        ss.worth(JOB.replace(strategy="zero-3"))


def test_a_gain_within_the_error_of_predictions_is_no_reason_to_compress() -> None:
    from shardscope.measure.worth import PredictedStep, Worth

    plain = PredictedStep(ss.Compression(), 100.0, 0.1, 0.0, 0.0)
    packed = PredictedStep(ss.Compression("int4"), 10.0, 0.09, 0.005, 0.0)
    found = Worth("a link", (plain, packed))
    assert not found.pays
    assert found.verdict == (
        "On a link compressing does not pay: int4 would be 5 % quicker, less than predictions err by."
    )
