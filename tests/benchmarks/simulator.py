"""How many events a second the simulator processes on one core, and how long steps of large layouts take.

    python tests/benchmarks/simulator.py

The ring all-reduce of 1,024 workers is the event loop alone, on a graph that is already there; the steps also build
their graph and divide their time into terms. With ``SHARDSCOPE_SIMULATOR=python`` the loop is interpreted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

import shardscope as ss
from shardscope.analytic.communication import collective_time
from shardscope.simulator.graph import Times, run

T = TypeVar("T")
ROUNDS = 5
LINK = {"bandwidth": 12.5e9, "latency": 5e-6}


def ring(workers: int, rounds: int, *, shared: bool) -> Times:
    """Run rounds of a ring; with `shared`, pairs of workers share a link to send, so that rates change all the time."""
    op = np.arange(rounds * workers).reshape(rounds, workers)
    same = np.stack([op[:-1].ravel(), op[1:].ravel()], axis=1)
    neighbour = np.stack([np.roll(op[:-1], 1, axis=1).ravel(), op[1:].ravel()], axis=1)
    place = np.arange(workers)
    links = np.empty((op.size, 2), np.int64)
    links[:, 0] = np.tile(place // (2 if shared else 1), rounds)
    links[:, 1] = np.tile(workers + (place + 1) % workers, rounds)
    latency = np.full(op.size, LINK["latency"])
    if shared:
        latency *= np.random.default_rng(0).uniform(0.5, 1.5, op.size)
    size = np.full(op.size, 1e9 / workers)
    edges = np.concatenate([same, neighbour])
    return run(latency, size, links.ravel(), np.full(2 * workers, LINK["bandwidth"]), edges)


def rates() -> None:
    """Print events per second, as medians."""
    few = 100 if os.environ.get("SHARDSCOPE_SIMULATOR") == "python" else 2046
    for shared in (False, True):
        found, seconds = _timed(lambda shared=shared: ring(1024, few, shared=shared))
        print(
            f"{'shared links' if shared else 'own links':<14}{found.num_events:>12,} events "
            f"{seconds:8.2f} s {found.num_events / seconds / 1e6:8.2f} million events/s"
        )
        if few == 2046 and not shared:
            formula = float(
                collective_time(op="all_reduce", algorithm="ring", num_bytes=1e9, workers=1024, **LINK)
            )
            print(f"{'':<14}all-reduce {found.total:.6f} s, by the formula {formula:.6f} s")


def steps() -> None:
    """Print the time to simulate steps of GPT-3 175B, and their simulated and predicted length."""
    model = ss.Model.of("gpt3-175b")
    cluster = ss.Cluster.of("a100-80gb", nodes=128)
    wide = ss.Cluster.of("a100-80gb", nodes=2048)
    layout = ss.Layout(
        data=8, tensor=8, pipeline=16, zero=1, global_batch=1536, schedule="interleaved", virtual_stages=3,
        recompute="full", precision="fp16-mixed",
    )  # fmt: skip
    wider = layout.replace(data=128, global_batch=1536 * 4)
    for name, where, asked, settings in (
        ("1,024 devices", cluster, layout, {}),
        ("1,024, a slow rank", cluster, layout, {"stragglers": {100: 1.3}}),
        ("1,024, jitter", cluster, layout, {"jitter": 0.05}),
        ("16,384 devices", wide, wider, {}),
        ("16,384, jitter", wide, wider, {"jitter": 0.05}),
    ):
        found, seconds = _timed(
            lambda where=where, asked=asked, settings=settings: ss.simulate(model, where, asked, **settings)
        )
        predicted = ss.predict(model, where, asked).step_time_s
        print(
            f"{name:<20}{found.num_events:>12,} events {seconds:8.2f} s; step {found.step_time_s:7.2f} s, "
            f"predicted {predicted:7.2f} s"
        )


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result and the median processor time of several calls, after one that may compile."""
    found, seconds = call(), []
    for _ in range(ROUNDS):
        begun = time.process_time()
        found = call()
        seconds.append(time.process_time() - begun)
    return found, statistics.median(seconds)


if __name__ == "__main__":
    rates()
    steps()
