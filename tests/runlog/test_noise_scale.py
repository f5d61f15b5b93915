"""The noise scale of real runs, read from their directories."""

from __future__ import annotations

import math

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.analytic.large_batch.noise_scale import NoiseScale
from shardscope.errors import SpecError


def test_a_run_tells_its_critical_batch_size():
    record = ss.Record(noise_scale=True, noise_every=2)
    run = ss.launch(small_job(steps=40, record=record, compression="int8")).wait(60)
    noise = ss.Run.attach(run.path).noise_scale()
    assert noise.steps == tuple(range(2, 41, 2))
    assert (noise.batch, noise.small_batch) == (64, 32)
    low, high = noise.interval
    assert 0 < low < noise.latest < high
    assert noise.latest == pytest.approx(noise.trace[-1] / noise.gradient_square[-1])
    assert list(noise.frame.columns) == ["step", "gradient_square", "trace", "critical_batch", "low", "high"]
    assert len(noise.frame) == 20
    assert f"critical batch {noise.latest:.4g}" in repr(noise)
    shorter = run.noise_scale(smoothing=0.5)
    assert shorter.latest != noise.latest
    # the sketch is in the traffic, and in no figure of what training sends
    sketches = [event["traffic"]["noise_scale"]["sent_bytes"] for event in run.events("step")[-2:]]
    assert sum(sketches) == 2 * 4 * 4096
    assert set(run.metrics().sent_bytes[2:]) == {run.summary().bytes_per_step}


def test_runs_that_do_not_measure_say_how():
    run = ss.launch(small_job(steps=2)).wait(60)
    with pytest.raises(
        SpecError, match=r"does not measure its noise scale; launch it with record=Record\(noise"
    ):
        run.noise_scale()


def test_nothing_measured_yet_is_an_empty_result():
    empty = NoiseScale(64, 32, 0.99, (), (), (), (), (), ())
    assert empty.latest is None
    assert empty.interval is None
    assert empty.frame.empty
    assert "no step has been measured yet" in repr(empty)
    one = NoiseScale(64, 32, 0.99, (1,), (1.0,), (5.0,), (5.0,), (0.0,), (math.inf,))
    assert one.interval == (0, math.inf)
