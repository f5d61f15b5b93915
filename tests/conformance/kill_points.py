"""Models whose ranks end a process at a chosen call within the shared memory transport.

A rank loads the job's model function before it joins its group. The function holds an object that counts calls from
then on, so a kill may come while the memory is being set up, too.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

VICTIMS = ("rank", "agent", "server", "kernel")
"""A rank, its run's agent, the launch server, and the process that called `launch`."""


class Plan(NamedTuple):
    """Where the victim is killed.

    Attributes:
        point: Key of `POINTS`; ``"any"`` leaves it to others to kill the victim.
        call: Number of the call, from 1, of one of the point's functions.
        before: Whether the victim is killed before the call, or after it.
        victim: One of `VICTIMS`.
        rank: The rank that counts its calls, and that is the victim if that is a rank.
        note: File that this rank writes before it kills.
        memfd: Whether the system allows anonymous files.
    """

    point: str
    call: int
    before: bool
    victim: str
    rank: int
    note: str
    memfd: bool


def _points() -> dict[str, list[tuple[Any, str]]]:
    from shardscope.training.transports import choice
    from shardscope.training.transports.shm import (
        collectives,
        files,
        group,
        memory,
        messages,
        peers,
        pipe,
        shards,
        works,
    )

    def of(owner: Any, *names: str) -> list[tuple[Any, str]]:
        return [(owner, name) for name in names]

    return {
        "set-up": [
            *of(choice, "open_tcp"), *of(files, "exchange", "create"), *of(peers, "exchange"),
            *of(memory.SharedMemory, "_join", "hold_presence"), *of(messages.Mailbox, "__init__"),
            *of(collectives.Slots, "__init__"),
        ],
        "collective": of(
            collectives.Slots, "_wait_for_all", "_write_others", "_add_share", "_copy_others", "_write_row", "_add_row",
            "_reduce_small", "_add",
        ),
        "message": [
            *of(pipe.Outgoing, "_write"), *of(pipe.Incoming, "_open", "_copy"), *of(messages.Mailbox, "complete"),
        ],
        "shards": of(
            shards.ShardBuffers, "meet", "gather_pieces", "reduce_pieces", "add", "reduce", "_add_up", "to_reduce",
        ),
        "shutdown": [
            *of(group.SharedMemoryGroup, "shutdown"), *of(peers.Peers, "close"), *of(works.CollectiveThread, "close"),
            *of(messages.Mailbox, "close"), *of(memory.SharedMemory, "close"),
        ],
    }  # fmt: skip


POINTS = {"set-up": 10, "collective": 150, "message": 300, "shards": 100, "shutdown": 5}
"""Phases of a run, and how many calls a rank makes in each, at least, unless it runs for ever."""


class Armed:
    """What a model function holds: where it is loaded by a rank, it arms the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[Callable[..., Armed], tuple[Plan]]:
        return arm, (self._plan,)


def arm(plan: Plan) -> Armed:
    """Carry out the plan in this process, if it is a rank."""
    rank = os.environ.get("RANK")
    if rank is not None and not plan.memfd:
        os.memfd_create = _forbidden
    if rank == str(plan.rank) and plan.point in POINTS:
        _count_calls(plan)
    return Armed(plan)


def _forbidden(*_: object) -> NoReturn:
    raise OSError(errno.EPERM, "Operation not permitted")


def _count_calls(plan: Plan) -> None:
    left = [plan.call]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if not plan.before or left[0]:
                is_due = left[0] == 0
                result = function(*arguments, **options)
                if is_due:
                    _kill(plan)
                return result
            _kill(plan)
            return function(*arguments, **options)

        return call

    for owner, name in _points()[plan.point]:
        setattr(owner, name, counted(getattr(owner, name)))


def _kill(plan: Plan) -> None:
    family = [psutil.Process(), *psutil.Process().parents()]  # rank, forkserver, agent, server, kernel
    victim = family[(0, 2, 3, 4)[VICTIMS.index(plan.victim)]]
    Path(plan.note).write_text(json.dumps([time.time(), victim.pid]))
    os.kill(victim.pid, signal.SIGKILL)


def model_of(plan: Plan, width: int) -> Callable[[], Any]:
    """Return a model function: an MLP of five layers, whose ranks carry out the plan."""

    def model(armed: Armed = Armed(plan)) -> Any:  # noqa: B008 - travels with the function
        from torch import nn

        sizes = [64, width, width, 32, 32]
        layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 10))

    return model
