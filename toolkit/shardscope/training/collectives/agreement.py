"""Check that all ranks take the same path through a model whose layers communicate one by one.

Under `fully_shard` the model's own code decides which layer communicates next. If ranks take different branches, one
rank's message for a layer could be received as its peer's message for another. So every collective has a `Purpose`, and
its messages carry a tag derived from it: the messages of ranks that disagree never pair, and the ranks wait for each
other. A rank that has waited for a moment writes its path to the group's store and compares it with the paths that the
others have written. After one rank has found the first difference, all raise the same error message. On our ring this
costs nothing while ranks agree. The backend's collectives pair messages by order alone, so ranks meet before each.

At the end of each step, before the optimizer, all ranks `require`: each rank sends one digest of all purposes to every
other.
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
"""Seconds that a rank waits before it looks for a disagreement, and between two looks."""
_TELLING_S = 5.0
"""Seconds that the others have to write down their collective at the first difference, after one rank has found it."""
_REMEMBERED = 4096
"""Maximum number of collectives kept since the last meeting; an evaluation may have any number."""
_FIRST_TAG = 1 << 30  # above all other tags
_NUM_TAGS = _FIRST_TAG - (1 << 24)  # leaves room for the messages of one collective
_VERDICT = "verdict"
_made = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True)
class Purpose:
    """The purpose of a collective in words: ``reduces the gradients of``, layer ``blocks.0``.

    Attributes:
        verb: The rank's action, on the layer where there is one.
        layer: Name of the unit of communication.
        num_elements: Size of the tensor.
        names: Parameters that take part.
    """

    verb: str
    layer: str = ""
    num_elements: int = 0
    names: tuple[str, ...] = ()


class _Noted(NamedTuple):
    """One collective on a rank's path; the digest covers the path up to and including it."""

    number: int
    digest: str
    place: str
    purpose: Purpose


_Told = tuple[int, str, Purpose]
"""A rank, the place of its training, and the purpose of its collective there."""


class Agreement:
    """This rank's path of collectives since the last meeting, for comparison with the other ranks' paths.

    Args:
        group: The group of all ranks.
        sender: The thread that exchanges digests.
        strategy: The strategy's name, for the error message.
        place: Returns the current point in training, such as ``step 3``; the same on ranks that agree.
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
        """Whether ranks have diverged: the sending thread may then wait for a peer that never arrives."""

    def tag(self, purpose: Purpose) -> int:
        """Record the next collective of this rank; returns the tag of its first message."""
        place = self._place()
        self._number += 1
        self._digest = blake2b(self._digest + repr((place, purpose)).encode(), digest_size=8).digest()
        self._path.append(_Noted(self._number, self._digest.hex(), place, purpose))
        return _FIRST_TAG + int.from_bytes(self._digest, "little") % _NUM_TAGS

    def require(self, purpose: Purpose) -> None:
        """Wait until all ranks have reached this point by the same path.

        Raises:
            SpecError: The ranks have taken different paths.
        """
        tag = self.tag(purpose)
        own = torch.frombuffer(bytearray(self._digest), dtype=torch.uint8)

        def exchange() -> Tensor:
            self._packets.tag = tag
            return self._packets.all_gather(own, name="agreement")

        digests = self.wait(self._sender.submit(exchange))
        while not torch.equal(digests, own.expand_as(digests)):  # two tags were equal by chance
            self._look()
        self._path.clear()

    def wait(self, future: Future[T]) -> T:
        """Wait for the sending thread and return its result.

        Raises:
            SpecError: The ranks have taken different paths, so that it would never finish.
        """
        while True:
            try:
                failure = future.exception(PATIENCE_S)
                break
            except TimeoutError:
                self._look()
        if failure is not None:
            self._raise_verdict()  # a peer that raised it may have ended and closed its connections
        return future.result()

    def _look(self) -> None:
        """Write this rank's path to the store, and raise if another path differs from it."""
        self._store.set(f"{self._rank}", json.dumps({row.number: row.digest for row in self._path}))
        self._raise_verdict()
        paths = [json.loads(text) for rank in range(self._world_size) if (text := self._read(f"{rank}"))]
        own = {str(row.number): row for row in self._path}
        parted = [n for n in own if any(path.get(n, own[n].digest) != own[n].digest for path in paths)]
        if parted:
            self._tell(own[parted[0]])

    def _tell(self, noted: _Noted) -> None:
        """Raise the error about the first difference; all ranks use the message of the rank that wrote it first."""
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
    """A rank's action in words; for a layer that both exchange, the parameters for which only it has a gradient."""
    own = [repr(name) for name in purpose.names if name not in other.names]
    shown = ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
    if not purpose.layer:
        return f"{purpose.verb} {shown and f'and has a gradient of {shown}'}".rstrip()
    if (purpose.verb, purpose.layer) != (other.verb, other.layer):
        return f"{purpose.verb} layer {purpose.layer!r}"
    return f"{purpose.verb} {shown or 'fewer parameters'} in layer {purpose.layer!r}"
