"""Parameter servers and gossip: whoever fails is named with its role, and stopping is quick."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.runs import endless_job, rank_pids, small_job, wait_for

pytestmark = pytest.mark.slow

STOPPED = [
    ss.ParameterServer(),
    ss.ParameterServer(dedicated=True),
    ss.ParameterServer(mode="async"),
    ss.ParameterServer(mode="async", dedicated=True),
    ss.ParameterServer(mode="ssp", servers=2, staleness=2),
    ss.Gossip(mix_every=3),
]


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STOPPED, ids=lambda strategy: strategy.label)
def test_stopping_ends_all_ranks_cleanly_wherever_each_is(strategy: Any) -> None:
    def make_model() -> nn.Module:
        class Uneven(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if os.environ["RANK"] == "3":
                    time.sleep(0.02)
                return self.layers(x.flatten(1))

        return Uneven()

    job = endless_job(
        strategy=strategy, world_size=4, batch=48, model=make_model, eval_every=7,
        checkpoint=ss.Checkpoint(at_end=True),
    )  # fmt: skip
    for pause in (0.0, 0.3):
        run = ss.launch(job)
        rank_pids(run)
        time.sleep(pause)
        started = time.monotonic()
        assert run.stop(grace_s=60.0).state == "stopped", run.error
        assert run.reason == "asked to stop"
        assert time.monotonic() - started < 60  # the grace does not run out
        ends = run.events("end")
        assert len(ends) == 4
        assert len({end["steps"] for end in ends}) == 1
        assert run.events("checkpoint")


def test_what_goes_wrong_in_a_servers_thread_ends_the_run_and_is_told() -> None:
    def make_model() -> nn.Module:
        from shardscope.methods.strategies.parameter_server._torch_server import ParameterShardServer

        def broken(self: ParameterShardServer, workers: list[int]) -> float:
            raise KeyError("no such shard")

        if os.environ["RANK"] == "0":
            ParameterShardServer._update = broken  # type: ignore[method-assign]
        elif os.environ["RANK"] == "1":
            time.sleep(0.3)  # so that the last gradient comes from elsewhere, and a thread takes it
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    run = ss.launch(small_job(strategy=ss.ParameterServer(servers=2), model=make_model, timeout_s=100))
    with pytest.raises(ss.RunFailed, match=r"rank 0 \(server and worker\).*KeyError: 'no such shard'"):
        run.wait(60)  # and not for the time-out


def make_model_that(acts: Callable[[], None]) -> Callable[[], nn.Module]:
    """A function that makes a model which acts in the third forward pass of rank 2."""

    def make_model() -> nn.Module:
        class Acts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.calls = nn.Linear(64, 10), 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                if self.calls == 3 and os.environ["RANK"] == "2":
                    acts()
                return self.layer(x.flatten(1))

        return Acts()

    return make_model


def test_a_worker_that_raises_is_the_cause_and_not_its_server() -> None:
    def acts() -> None:
        raise ValueError("a bad batch")

    job = small_job(
        strategy=ss.ParameterServer(dedicated=True), world_size=3, model=make_model_that(acts), batch=48
    )
    run = ss.launch(job)
    with pytest.raises(ss.RunFailed, match=r"rank 2 \(worker\).* failed at step 3: ValueError: a bad batch"):
        run.wait(60)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", [ss.ParameterServer(mode="ssp"), ss.ParameterServer(dedicated=True)])
def test_a_worker_that_falls_silent_is_named_by_the_server_that_waits_for_it(strategy: Any) -> None:
    model = make_model_that(lambda: time.sleep(1000))
    run = ss.launch(endless_job(strategy=strategy, world_size=3, batch=48, model=model, timeout_s=10))
    with pytest.raises(
        ss.RunFailed, match=r"rank 0 \(server.*worker rank 2 sent nothing for 10 s; .*raise timeout_s=10"
    ):
        run.wait(120)


@pytest.mark.parametrize("strategy", ["parameter-server:async", "gossip"])
def test_a_loss_that_is_no_number_ends_the_run(strategy: str) -> None:
    run = ss.launch(small_job(strategy=strategy, loss=lambda o, t: o.sum() * float("nan")))
    with pytest.raises(ss.RunFailed, match="the loss became nan"):
        run.wait(60)
    wait_for(lambda: not run.is_alive)
