"""The learning-rate range test: real runs whose rate rises until the loss explodes."""

from __future__ import annotations

import numpy as np
import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.errors import RunFailed, SpecError
from shardscope.tuning.lr_range import _has_exploded, range_job


def test_a_range_test_of_a_real_run():
    found = ss.lr_range_test(small_job(optimizer="sgd"), low=1e-4, high=1e3, steps=60)
    assert found.exploded
    assert found.lr[:10] == pytest.approx(np.geomspace(1e-4, 1e3, 60)[:10])
    assert len(found.lr) == len(found.loss) == len(found.smooth) <= 60
    assert np.isfinite(found.loss).all()
    assert 1e-3 < found.suggested <= found.rates.lowest < found.lr[-1]
    assert found.rates.tenth_of_lowest == found.rates.lowest / 10
    run = ss.Run.attach(found.run_id)
    assert not run.is_alive
    assert run.name == "lr-range-ring-mlp"
    assert "where the loss exploded" in repr(found)
    assert list(found.frame.columns) == ["lr", "loss", "smooth"]


def test_the_last_step_is_at_the_highest_rate():
    job = range_job(small_job(lr_schedule="cosine", eval_every=2), low=1e-5, high=1e-1, steps=10)
    run = ss.launch(job).wait(60)
    assert run.metrics().lr.to_numpy() == pytest.approx(np.geomspace(1e-5, 1e-1, 10))
    assert len(run.events("eval", rank=0)) == 1  # after the last step


def test_a_run_that_fails_for_another_reason_says_so():
    with pytest.raises(RunFailed, match="no such luck"):
        ss.lr_range_test(small_job(loss=_unlucky), steps=10)


def _unlucky(output, target):
    raise RuntimeError("no such luck")


def test_refusals_say_the_way_out():
    with pytest.raises(SpecError, match="0 < low < high"):
        ss.lr_range_test(small_job(), low=1.0, high=0.1)
    with pytest.raises(SpecError, match="steps=9 are too few for a range test; use at least 10"):
        ss.lr_range_test(small_job(), steps=9)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_explosion_is_four_times_the_lowest_loss(sign):
    calm = [sign * 2.0] * 40
    assert not _has_exploded(calm)
    assert not _has_exploded([*calm, *[sign * 2.0 + 5] * 10])
    assert _has_exploded([*calm, *[sign * 2.0 + 8] * 10])
    assert not _has_exploded([2.0, 100.0])  # too few to tell
