"""Check that all ranks take the same path through a model whose layers communicate one at a time.

Under `fully_shard`, the model's own code decides which layer communicates next. If ranks take different branches, a
rank could receive a message for one layer as if it were for another. So every collective has a `Purpose`, and its
messages carry a tag derived from the path so far: messages of ranks that disagree never match, and those ranks wait for
each other. A rank that has waited for some time writes its path to the group's store and compares it with the paths
that other ranks have written. Once one rank has found the first difference, all ranks raise the same error. On
Shardscope's ring this costs nothing while ranks agree. The backend's collectives match messages by order alone, so
ranks synchronise before each of them.

At the end of each step, before the optimizer runs, all ranks call `require`: each rank sends every other rank a digest
of all its purposes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.collectives.sender import Sender

PATIENCE_S = 0.5
"""Time that a rank waits before it checks for a disagreement, and between two checks, in seconds."""
_TELLING_S = 5.0
"""Time for the other ranks to report their collective once one rank has found the first difference, in seconds."""
_REMEMBERED = 4096
"""Maximum number of collectives recorded since the last `require`; an evaluation may run any number of them."""
_FIRST_TAG = 1 << 30  # above all other tags
_NUM_TAGS = _FIRST_TAG - (1 << 24)  # leaves room for the messages of one collective
_VERDICT = "verdict"
_made = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True)
class Purpose:
    """The purpose of a collective in words, such as ``reduces the gradients of`` layer ``blocks.0``.

    Attributes:
        verb: What the rank does, up to the name of the layer if there is one.
        layer: Name of the FSDP unit; empty if the collective belongs to none.
        num_elements: Number of elements of the tensor.
        names: Names of the parameters that take part.
    """

    verb: str
    layer: str = ""
    num_elements: int = 0
    names: tuple[str, ...] = ()


class _Noted(NamedTuple):
    """One collective on a rank's path; `digest` covers the path up to and including this collective."""

    number: int
    digest: str
    place: str
    purpose: Purpose


_Told = tuple[int, str, Purpose]
"""A rank, its point in training, and the purpose of its collective there."""


class Agreement:
    """This rank's sequence of collectives since the last `require`, to compare with those of the other ranks.

    Args:
        group: The group of all ranks.
        sender: The thread that exchanges digests.
        strategy: The strategy's name, for the error message.
        place: Returns the current point in training, such as ``step 3``; it must be the same on ranks that agree.
    """

    def __init__(
        self, group: MeteredProcessGroup, sender: Sender, strategy: str, place: Callable[[], str]
    ) -> None:
        self._sender, self._strategy, self._place = sender, strategy, place
        self._rank, self._world_size = group.rank(), group.size()
        self._packets = Packets(group)
        series = torch.tensor([next(_made)], device="cpu")
        dist.broadcast(series, src=0)
        self._store = dist.PrefixStore(f"agreement/{int(series)}", group.get_group_store())
        self._digest, self._number = int(series).to_bytes(8, "little"), 0
        self._path: deque[_Noted] = deque(maxlen=_REMEMBERED)
        self.refused = False
        """Whether ranks have diverged; if so, the sending thread may be waiting for a peer that never arrives."""

    def tag(self, purpose: Purpose) -> int:
        """Record this rank's next collective, and return the tag of its first message."""
        place = self._place()
        self._number += 1
        self._digest = blake2b(self._digest + repr((place, purpose)).encode(), digest_size=8).digest()
        self._path.append(_Noted(self._number, self._digest.hex(), place, purpose))
        return _FIRST_TAG + int.from_bytes(self._digest, "little") % _NUM_TAGS

    def require(self, purpose: Purpose) -> None:
        """Wait until all ranks have reached this point along the same path.

        Raises:
            SpecError: The ranks took different paths.
        """
        tag = self.tag(purpose)
        own = torch.frombuffer(bytearray(self._digest), dtype=torch.uint8)

        def exchange() -> Tensor:
            self._packets.tag = tag
            return self._packets.all_gather(own, name="agreement")

        digests = self.wait(self._sender.submit(exchange))
        while not torch.equal(digests, own.expand_as(digests)):  # different paths, but equal tags by chance
            self._look()
        self._path.clear()

    def wait(self, future: Future[T]) -> T:
        """Wait for the sending thread and return its result.

        Raises:
            SpecError: The ranks took different paths, so the task would never finish.
        """
        while True:
            try:
                failure = future.exception(PATIENCE_S)
                break
            except TimeoutError:
                self._look()
        if failure is not None:
            self._raise_verdict()  # a peer that raised the verdict may have ended and closed its connections
        return future.result()

    def _look(self) -> None:
        """Write this rank's path to the store, and raise an error if another rank's path differs from it."""
        self._store.set(f"{self._rank}", json.dumps({row.number: row.digest for row in self._path}))
        self._raise_verdict()
        paths = [json.loads(text) for rank in range(self._world_size) if (text := self._read(f"{rank}"))]
        own = {str(row.number): row for row in self._path}
        parted = [n for n in own if any(path.get(n, own[n].digest) != own[n].digest for path in paths)]
        if parted:
            self._tell(own[parted[0]])

    def _tell(self, noted: _Noted) -> None:
        """Raise the error for the first difference; all ranks use the message that was written first."""
        self._store.set(f"{self._rank}/{noted.number}", json.dumps([noted.place, asdict(noted.purpose)]))
        deadline = time.monotonic() + _TELLING_S
        while len(told := self._told(noted.number)) < self._world_size and time.monotonic() < deadline:
            time.sleep(PATIENCE_S / 10)
        other = next((row for row in told if row[1:] != told[0][1:]), None)
        if other is not None:
            self._store.compare_set(_VERDICT, "", _sentence(self._strategy, told[0], other))
            self._raise_verdict()

    def _told(self, number: int) -> list[_Told]:
        rows = [(rank, self._read(f"{rank}/{number}")) for rank in range(self._world_size)]
        parsed = [(rank, *json.loads(text)) for rank, text in rows if text]
        return [(rank, place, Purpose(**purpose)) for rank, place, purpose in parsed]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _raise_verdict(self) -> None:
        if sentence := self._read(_VERDICT):
            self.refused = True
            raise SpecError(sentence)


def _sentence(strategy: str, first: _Told, other: _Told) -> str:
    (a, place, mine), (b, elsewhere, theirs) = first, other
    where = "" if elsewhere == place else f" in {elsewhere}"
    return (
        f"in {place}, rank {a} {_said(mine, theirs)}, but rank {b}{where} {_said(theirs, mine)}; "
        f"strategy={strategy!r} needs all ranks to use the same layers in each micro-batch: let no branch of the "
        "model depend on a rank's own data, or use strategy='single' or 'gossip'"
    )


def _said(purpose: Purpose, other: Purpose) -> str:
    """Describe a rank's action; if both ranks exchange the same layer, name the parameters that only this rank has."""
    own = [repr(name) for name in purpose.names if name not in other.names]
    shown = ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
    if not purpose.layer:
        return f"{purpose.verb} {shown and f'and has a gradient of {shown}'}".rstrip()
    if (purpose.verb, purpose.layer) != (other.verb, other.layer):
        return f"{purpose.verb} layer {purpose.layer!r}"
    return f"{purpose.verb} {shown or 'fewer parameters'} in layer {purpose.layer!r}"
