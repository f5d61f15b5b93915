"""A rank that ends without an error, or that is stopped, does not keep its run waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.runs import all_gone, rank_pids, small_job


def model_that(acts: Callable[[], None], victim: int) -> Callable[[], nn.Module]:
    """A function that makes a model which acts in the third forward pass of a rank."""

    def make_model() -> nn.Module:
        class Acts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.calls = nn.Linear(64, 10), 0

            def forward(self, x: Any) -> Any:
                self.calls += 1
                if self.calls == 3 and int(os.environ["RANK"]) == victim:
                    acts()
                return self.layer(x.flatten(1))

        return Acts()

    return make_model


def leave() -> None:
    os._exit(0)


@pytest.mark.parametrize(("strategy", "world_size", "victim"), [("single", 1, 0), ("ring", 2, 1)])
def test_a_rank_that_exits_as_if_all_were_well_is_named(strategy: str, world_size: int, victim: int) -> None:
    run = ss.launch(
        small_job(model=model_that(leave, victim), strategy=strategy, world_size=world_size, timeout_s=50)
    )
    with pytest.raises(
        ss.RunFailed, match=rf"^rank {victim} of .* ended with exit code 0 after step 2, without"
    ):
        run.wait(40)
    assert all_gone([event["pid"] for event in run.events("process")])


def test_ranks_that_are_stopped_are_not_waited_for() -> None:
    """Elastic asks them to end, and waits for half a minute; a restart waited as long."""
    run = ss.launch(small_job(steps=1_000_000, world_size=3, batch=48, recovery=1))
    pids = rank_pids(run)
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    asked = time.monotonic()
    while run.restarts == 0 and time.monotonic() < asked + 20:
        time.sleep(0.05)
    assert run.restarts == 1
    assert all_gone([*pids.values()], timeout=0.0)
    run.stop(grace_s=0.0)
