"""Checks that all ranks call the same collectives in the same order, in models whose layers communicate individually.

With `fully_shard`, the model's code decides which layer communicates next. If ranks take different branches, a rank
could use one layer's message for another layer. So every collective has a `Purpose`, such as "gathers the parameters of
layer X", and a rank's sequence of purposes is its path. Messages have a tag computed from the path so far. If the paths
of two ranks differ, their messages do not match, and both ranks wait. A rank that has waited for some time writes its
path to the group's store, and compares it with the paths of the other ranks. After a rank has found the first
difference, all ranks raise the same error.

With Shardscope's ring collectives, this takes no extra communication as long as the paths are equal. The backend's
collectives match messages only by their order, so when those are used, the ranks synchronise before each collective.

At the end of each step, before the optimizer runs, all ranks call `require`, in which they exchange a digest of their
paths.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.sender import Sender

PATIENCE_S = 0.5
"""Time that a rank waits before it first compares paths, and between comparisons, in seconds."""
_REPORT_TIMEOUT_S = 5.0
"""Time that a rank waits, after it has found a difference, for the reports of the other ranks, in seconds."""
_MAX_RECORDED = 4096
"""Maximum number of collectives in the recorded path; an evaluation may run any number of them."""
_FIRST_TAG = 1 << 30  # above the tags of all other messages
_NUM_TAGS = _FIRST_TAG - (1 << 24)  # leaves 2**24 tags for the messages of one collective
_VERDICT = "verdict"
_made = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True)
class Purpose:
    """The purpose of a collective, such as ``reduces the gradients of`` layer ``blocks.0``, for an error message.

    Attributes:
        verb: The rank's action in words, without the name of the layer.
        layer: Name of the FSDP unit; empty if the collective does not belong to a unit.
        num_elements: Number of elements of the tensor.
        names: Names of the parameters that have a gradient in this collective.
    """

    verb: str
    layer: str = ""
    num_elements: int = 0
    names: tuple[str, ...] = ()


@lru_cache(_MAX_RECORDED)
def _encoded(purpose: Purpose) -> bytes:
    """Return a purpose as bytes; cached, because each step repeats the purposes of the previous step."""
    return repr(purpose).encode()


class _PathEntry(NamedTuple):
    """One collective on a rank's path.

    Attributes:
        number: Number of the collective, counted from 1.
        digest: Digest of the path up to and including this collective.
        place: The point in training, such as ``step 3``.
        purpose: The purpose of the collective.
    """

    number: int
    digest: bytes
    place: str
    purpose: Purpose


_RankReport = tuple[int, str, Purpose]
"""A rank, the point in training that it has reached, and the purpose of its collective."""


class Agreement:
    """Records this rank's path (its collectives since the last `require`) and compares it with those of other ranks.

    Args:
        group: The group of all ranks.
        sender: The thread that exchanges digests.
        strategy: The strategy's name, for the error message.
        place: Function that returns the current point in training, such as ``step 3``; part of the path.
    """

    def __init__(
        self, group: MeteredProcessGroup, sender: Sender, strategy: str, place: Callable[[], str]
    ) -> None:
        self._sender, self._strategy, self._place = sender, strategy, place
        self._rank, self._world_size, self._meter = group.rank(), group.size(), group.meter
        self._packets = Packets(group)
        series = torch.tensor([next(_made)], device="cpu")
        dist.broadcast(series, group=group, group_src=0)
        self.store = dist.PrefixStore(f"agreement/{int(series)}", group.get_group_store())
        """A store for this model's ranks alone."""
        self._digest, self._number = int(series).to_bytes(8, "little"), 0
        self._path: deque[_PathEntry] = deque(maxlen=_MAX_RECORDED)
        self.refused = False
        """Whether ranks have called different collectives; if so, the sending thread may be waiting forever."""

    def note(self, purpose: Purpose) -> int:
        """Add a collective to this rank's path, and return the 64-bit digest of the path."""
        place = self._place()
        self._number += 1
        self._digest = blake2b(
            b"\0".join((self._digest, place.encode(), _encoded(purpose))), digest_size=8
        ).digest()
        self._path.append(_PathEntry(self._number, self._digest, place, purpose))
        return int.from_bytes(self._digest, "little")

    def tag(self, purpose: Purpose) -> int:
        """Add a collective to this rank's path, and return the tag of its first message."""
        return _FIRST_TAG + self.note(purpose) % _NUM_TAGS

    def require(self, purpose: Purpose) -> None:
        """Wait until all ranks have called this after the same collectives, then start a new path.

        Raises:
            SpecError: The ranks have called different collectives.
        """
        tag = self.tag(purpose)
        own = torch.frombuffer(bytearray(self._digest), dtype=torch.uint8)

        def exchange() -> Tensor:
            self._packets.tag = tag
            return self._packets.all_gather(own, name="agreement")

        digests = self.wait(self._sender.submit(exchange))
        if not torch.equal(digests, own.expand_as(digests)):  # different paths, but equal tags by chance
            self.raise_difference()
        self.start_path()

    def start_path(self) -> None:
        """Start a new path; called when all ranks are known to have called the same collectives so far."""
        self._path.clear()

    def raise_difference(self) -> NoReturn:
        """Raise the error that names the first difference; called on all ranks once their digests differ.

        Raises:
            SpecError: The ranks have called different collectives.
            DistBackendError: A rank ended before it reported its collectives.
        """
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while time.monotonic() < deadline:  # until the other ranks have written their paths to the store
            self._compare_paths()
            time.sleep(PATIENCE_S / 10)
        self.refused = True
        silent = [rank for rank in range(self._world_size) if not self._read(f"{rank}")]
        missing = f"rank {silent[0]} to report its own" if silent else "a report of the first difference"
        raise dist.DistBackendError(
            f"the ranks have called different collectives: Timed out waiting for {missing}"
        )

    def wait(self, future: Future[T]) -> T:
        """Wait for a task of the sending thread and return its result.

        Raises:
            SpecError: The ranks have called different collectives, so the task would never finish.
        """
        while True:
            try:
                with self._meter.waiting():
                    failure = future.exception(PATIENCE_S)
                break
            except TimeoutError:
                self._compare_paths()
        if failure is not None:
            self._raise_verdict()  # the task may have failed because another rank raised the error and exited
        return future.result()

    def _compare_paths(self) -> None:
        """Write this rank's path to the store, and raise `SpecError` if the path of another rank differs."""
        self.store.set(f"{self._rank}", json.dumps({row.number: row.digest.hex() for row in self._path}))
        self._raise_verdict()
        paths = [json.loads(text) for rank in range(self._world_size) if (text := self._read(f"{rank}"))]
        own = {str(row.number): row for row in self._path}
        digests = {n: row.digest.hex() for n, row in own.items()}
        differing = [n for n in own if any(path.get(n, digests[n]) != digests[n] for path in paths)]
        if differing:
            self._raise_difference(own[differing[0]])

    def _raise_difference(self, noted: _PathEntry) -> None:
        """Raise the error for the first difference; all ranks raise the message that was written to the store first."""
        self.store.set(f"{self._rank}/{noted.number}", json.dumps([noted.place, asdict(noted.purpose)]))
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while len(reports := self._reports(noted.number)) < self._world_size and time.monotonic() < deadline:
            time.sleep(PATIENCE_S / 10)
        other = next((row for row in reports if row[1:] != reports[0][1:]), None)
        if other is not None:
            self.store.compare_set(_VERDICT, "", _sentence(self._strategy, reports[0], other))
            self._raise_verdict()

    def _reports(self, number: int) -> list[_RankReport]:
        rows = [(rank, self._read(f"{rank}/{number}")) for rank in range(self._world_size)]
        parsed = [(rank, *json.loads(text)) for rank, text in rows if text]
        return [(rank, place, Purpose(**purpose)) for rank, place, purpose in parsed]

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _raise_verdict(self) -> None:
        if sentence := self._read(_VERDICT):
            self.refused = True
            raise SpecError(sentence)


def _sentence(strategy: str, first: _RankReport, other: _RankReport) -> str:
    (a, place, mine), (b, elsewhere, theirs) = first, other
    where = "" if elsewhere == place else f" in {elsewhere}"
    return (
        f"in {place}, rank {a} {_action(mine, theirs)}, but rank {b}{where} {_action(theirs, mine)}; "
        f"strategy={strategy!r} requires that all ranks use the same layers in each micro-batch: change the model so "
        "that no branch depends on a rank's own data, or use strategy='single' or 'gossip'"
    )


def _action(purpose: Purpose, other: Purpose) -> str:
    """Return a description of a rank's action, for the error message.

    If both ranks reduce the same layer, the description names the parameters that have a gradient only on this rank.
    """
    own = [repr(name) for name in purpose.names if name not in other.names]
    shown = ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
    if not purpose.layer:
        return f"{purpose.verb} {shown and f'and has a gradient of {shown}'}".rstrip()
    if (purpose.verb, purpose.layer) != (other.verb, other.layer):
        return f"{purpose.verb} layer {purpose.layer!r}"
    return f"{purpose.verb} {shown or 'fewer parameters'} in layer {purpose.layer!r}"
