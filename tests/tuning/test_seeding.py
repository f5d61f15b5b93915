"""Seeds are queued once, whoever begins a study together, and whoever of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

import shardscope as ss
from shardscope.tuning import recovery, storage
from shardscope.tuning.objectives import DEFAULT_OBJECTIVES
from shardscope.tuning.priors import default_space, seeds
from shardscope.tuning.records import NOT_COUNTED, OVER_BUDGET, SEED
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=64)
SPACE = default_space(JOB)
NUM_SEEDS = len(seeds(JOB, SPACE, DEFAULT_OBJECTIVES))
DRIVERS = 8
MAKING = 4
"""Writes that make a study: it, the names of its objectives, its definition, its job in words. Then come the seeds."""
CASES = {
    "all live": None, "first write": 0, "two seeds in": MAKING + 1, "four in": MAKING + 3,
    "before it says so": MAKING + NUM_SEEDS - 1,
}  # fmt: skip
"""When all drivers but two are killed, by writes."""


def begin(root: Path, gate: int, dies_after: int | None, stated_within_s: float) -> None:
    """Open the study and have its seeds queued once the gate is closed; be killed after so many writes to it."""
    from optuna.storages.journal import JournalFileBackend

    os.fsync = lambda file: None
    storage.STATED_WITHIN_S = stated_within_s
    whole, writes = JournalFileBackend.append_logs, iter(range(10**6))

    def append(self: Any, logs: list[dict[str, Any]]) -> None:
        whole(self, logs)
        if next(writes) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    JournalFileBackend.append_logs = append  # type: ignore[method-assign]
    os.read(gate, 1)
    if dies_after is None:
        time.sleep(0.05)  # so that mostly one of the mortals is first
    session = StudySession.open(JOB, SPACE, trials=4, name="together", root=root)
    if session.driver.seed is not None:
        session.driver.seed()


def together(root: Path, dies_after: int | None) -> list[int]:
    """Have drivers begin a study at one moment, all but two of them mortal; how each ended."""
    gate, end = os.pipe()
    # Where all live they may be slow, and are not taken for dead.
    stated_within_s = 60.0 if dies_after is None else 0.3
    children = []
    for number in range(DRIVERS):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(end)
            code = 1
            try:
                begin(root, gate, dies_after if number < DRIVERS - 2 else None, stated_within_s)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
    os.close(end)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Run by the test below in a process that has no threads, which forks need."""
    for name, dies_after in CASES.items():
        print(json.dumps(together(Path(sys.argv[1]) / name, dies_after)), flush=True)


@pytest.mark.weekly
def test_drivers_that_begin_together_queue_every_seed_once(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, __file__, tmp_path], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ends = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    assert sum(code != 0 for case in ends.values() for code in case) > 3
    for name, dies_after in CASES.items():
        mortal = {-signal.SIGKILL, 0} if dies_after is not None else {0}
        assert set(ends[name]) <= mortal, (name, done.stderr[-3000:])
        assert ends[name][-2:] == [0, 0]
        trials = StudySession.open(name="together", root=tmp_path / name).study.get_trials()
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        over_budget = [trial for trial in waiting if recovery.over_budget(trial.number, trials, 99)[0]]
        others = [trial for trial in trials if trial not in waiting]
        assert {trial.user_attrs[SEED] for trial in waiting} == set(range(NUM_SEEDS))
        assert len(waiting) - len(over_budget) == NUM_SEEDS
        assert {trial.user_attrs[NOT_COUNTED] for trial in others} <= {OVER_BUDGET}
        if dies_after is None:
            assert (others, over_budget) == ([], []), "where nobody dies, nothing is queued twice"


def test_a_seed_that_was_queued_again_is_surplus_to_whoever_begins_it() -> None:
    session = StudySession.open(JOB, SPACE, trials=4, name="again")
    first = session.study.get_trials()[0]
    session.study.enqueue_trial(first.system_attrs["fixed_params"], user_attrs={SEED: 0})
    trials = session.study.get_trials()
    assert recovery.over_budget(0, trials, 99) == (None, True)
    assert recovery.over_budget(len(trials) - 1, trials, 99) == (recovery.TAKEN, True)


if __name__ == "__main__":
    main()
