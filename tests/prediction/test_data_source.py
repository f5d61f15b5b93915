"""The predicted wait for a slow source of data."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.shards import numbered, row_bytes, shards_in, shards_job

BATCH = 24


@pytest.fixture
def slow(tmp_path):
    return shards_in(
        tmp_path / "s", slow=ss.Link(bandwidth=BATCH / 2 * row_bytes() / 0.5, latency="100 ms"), window=2
    )


@pytest.mark.usefixtures("two_known_cores")
def test_a_rank_waits_for_its_own_rows_less_what_it_computes_meanwhile(slow):
    without = ss.predict(shards_job(slow.replace(slow=None), batch=BATCH)).step_time_s
    found = ss.predict(shards_job(slow, batch=BATCH))
    assert found.step_time_s == pytest.approx(0.6, rel=0.1), "12 rows in half a second, and the latency"
    waiting = found.time["waiting for the source"]
    assert waiting.value == pytest.approx(found.step_time_s - without)
    assert found.time["data"].value >= waiting.value
    assert "of which" in repr(found)
    assert "per step waiting for data" in repr(found)


@pytest.mark.usefixtures("two_known_cores")
def test_ranks_that_compute_longer_do_not_wait(slow):
    quick = slow.replace(slow=ss.Link(bandwidth="10 GB/s", latency=0))
    found = ss.predict(shards_job(quick, batch=BATCH))
    assert "waiting for the source" not in {term.name for term in found.time.walk()}
    assert "waiting for data" not in repr(found)


@pytest.mark.usefixtures("two_known_cores")
def test_from_the_second_epoch_the_cache_holds_what_fits_into_it(slow, tmp_path):
    cached = slow.replace(cache="1 MB", cache_folder=str(tmp_path / "c"))
    found = ss.predict(shards_job(cached, batch=BATCH, steps=15))
    assert found.step_time_s > 0.4, "the job ends before the cache is full"
    assert (found.filling_s, found.run_time_s) == (0.0, pytest.approx(15 * found.step_time_s))
    assert found.at_step(15).step_time_s == pytest.approx(found.step_time_s), "360 rows are 15 steps"
    assert found.at_step(16).step_time_s < 0.1
    part = ss.predict(shards_job(cached.replace(cache=4 * 40 * row_bytes() + 2000), batch=BATCH))
    assert part.at_step(16).step_time_s > 0.4


@pytest.mark.usefixtures("two_known_cores")
def test_only_the_first_epoch_fills_the_cache(slow, tmp_path):
    cached = slow.replace(cache="1 MB", cache_folder=str(tmp_path / "c"))
    found = ss.predict(shards_job(cached, batch=BATCH, steps=150))
    assert found.step_time_s < 0.1
    first_s, later_s = (found.at_step(step).step_time_s for step in (15, 16))
    assert found.run_time_s == pytest.approx(15 * first_s + 135 * later_s, rel=1e-6)
    assert "waiting for data while the first epoch fills the cache" in repr(found)


@pytest.mark.usefixtures("two_known_cores")
def test_parquet_has_a_cache_without_being_asked(slow, tmp_path):
    """As the reader has it: a request for each shard, and none in the second epoch."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x, y = numbered(400)
    for number in range(10):
        rows = slice(40 * number, 40 * number + 40)
        parquet.write_table(pa.table({"x": list(x[rows]), "y": y[rows]}), tmp_path / f"{number}.parquet")
    found = ss.predict(shards_job(slow.replace(path=str(tmp_path)), batch=BATCH, steps=150))
    assert found.step_time_s < 0.1
    assert found.at_step(1).time["waiting for the source"].inputs["requests"] == pytest.approx(12 / 40)
