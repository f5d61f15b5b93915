"""A run whose directory is deleted or moved ends, and says so; nothing of it is made anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import shardscope as ss
from conformance.runs import all_gone, endless_job, family, freeze, rank_pids, wait_for

pytestmark = pytest.mark.slow


def delete(run: ss.Run) -> None:
    """As `rm -r` does, again where ranks have written meanwhile."""
    remove(run.path)


def move(run: ss.Run) -> None:
    run.path.rename(run.path.with_name("elsewhere"))


def replace(run: ss.Run) -> None:
    """Another directory under the same name."""
    move(run)
    run.path.mkdir()


def delete_with_all_runs(run: ss.Run) -> None:
    remove(run.path.parent)


def remove(folder: Path) -> None:
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def remove_once(folder: Path) -> None:
    """Delete a folder in which ranks may write meanwhile, and may make again as soon as it has gone."""
    while folder.exists():
        with suppress(OSError):  # a file came or went under the hand
            shutil.rmtree(folder)
            return


WAYS = [delete, move, delete_with_all_runs]


def running(**fields: object) -> tuple[ss.Run, list[int]]:
    run = ss.launch(endless_job(checkpoint=ss.Checkpoint(every=2), **fields))
    rank_pids(run)
    assert run.state == "running"
    return run, family(run)


@pytest.mark.sampled
@pytest.mark.parametrize("lose", WAYS)
def test_waiting_ends_in_one_sentence(lose: Callable[[ss.Run], None]) -> None:
    run, processes = running()
    lose(run)
    with pytest.raises(ss.RunFailed, match="is gone: it was deleted or moved") as failed:
        run.wait(60)
    assert "\n" not in str(failed.value)
    assert all_gone(processes)
    assert run.state == "failed"
    assert not run.path.exists()
    assert "failed" in repr(run)


@pytest.mark.sampled
@pytest.mark.parametrize("lose", WAYS)
def test_stopping_ends_it(lose: Callable[[ss.Run], None]) -> None:
    run, processes = running(strategy="zero-3", world_size=3, batch=48)
    lose(run)
    assert run.stop().state == "failed"
    assert all_gone(processes)
    assert not run.path.exists()


def test_an_agent_that_is_frozen_is_ended_by_stop_without_its_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardscope.runtime.record.run._KILL_AFTER_S", 0.5)
    run, processes = running()
    freeze(processes[:1])
    delete(run)
    assert run.stop(grace_s=0.0).state == "failed"
    assert all_gone(processes)


def test_a_directory_that_was_moved_tells_at_its_new_place_what_happened() -> None:
    run, processes = running()
    replace(run)
    assert all_gone(processes)
    moved = ss.Run.attach(run.path.with_name("elsewhere"))
    assert moved.state == "failed"
    assert "is gone: it was deleted or moved" in str(moved.error)
    assert len(moved.metrics()) >= 1
    assert list(run.path.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize("gated", [False, True])
def test_a_run_without_its_control_folder_is_stopped_like_any_other(*, gated: bool) -> None:
    run = ss.launch(endless_job(world_size=3, batch=48, eval_every=5), gated=gated)
    rank_pids(run)
    remove_once(run.path / "control")
    seen = len(run.events("step"))
    wait_for(lambda: len(run.events("step")) > seen + 20, run)
    assert run.stop(grace_s=60.0).state == "stopped"
    assert run.reason == "asked to stop"
    assert len({end["steps"] for end in run.events("end")}) == 1


def test_a_run_that_is_over_may_be_deleted() -> None:
    run = ss.launch(endless_job())
    rank_pids(run)
    run.stop()
    delete(run)
    assert run.wait(10).state == "stopped"
    assert run.stop().state == "stopped"


def test_a_run_deleted_before_it_starts_leaves_nothing(runs_root: Path) -> None:
    run = ss.launch(endless_job())
    delete(run)
    run.stop()
    assert run.state == "failed"
    assert not run.is_alive
    after = ss.launch(endless_job(name="next")).stop()
    assert (after.state, after.error) == ("stopped", None)  # the server takes one request after the other
    assert not run.path.exists()
