"""Faults to inject into a run, by kind: what fails, where, and when."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.units import Seconds, seconds_text

if TYPE_CHECKING:
    from shardscope.spec.cluster import EmulatedCluster
    from shardscope.spec.job import Job

_IN_TEXT = {"at_s": "at", "lasts_s": "lasts"}
"""Names, in a fault's short text, of the fields whose values have a unit there."""
_LINK = re.compile(r"n(\d{1,3})(?:-n(\d{1,3}))?")


class Fault(Spec):
    """Base class of injected faults."""

    kind: str
    """Kind of the fault."""
    word: ClassVar[str]
    """Name of the `Faults` method that adds such a fault; it is also the first word of the fault's short text."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Short description of the fault, for timelines and events."""

    @abstractmethod
    def check(self, job: Job, nodes: int | None, cluster: EmulatedCluster | None) -> None:
        """Raise `SpecError` if the fault cannot occur in a run of this job.

        Args:
            job: The job.
            nodes: Number of nodes; None if the job runs on this machine.
            cluster: The emulated cluster that the job runs on; None if it runs on none.
        """

    def __str__(self) -> str:
        return " ".join([self.word, *(f"{name}={value}" for name, value in self._told())])

    def _told(self) -> Iterator[tuple[str, str]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name != "kind" and value != type(self).model_fields[name].default:
                yield _IN_TEXT.get(name, name), _written(name, value)

    @classmethod
    def from_words(cls, words: list[str]) -> Self:
        """Read a fault from the words after its name: ``["rank=2", "step=40"]``.

        Raises:
            SpecError: A word is not KEY=VALUE, a field is unknown or missing, or a value is not valid.
        """
        by_text = {_IN_TEXT.get(name, name): name for name in cls.model_fields if name != "kind"}
        fields: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not value:
                raise SpecError(
                    f"{cls.word}: {quoted(word)} is not KEY=VALUE; write for example {cls._EXAMPLE!r}"
                )
            if name not in by_text:
                raise unknown_name(f"{cls.word} field", name, [*by_text])
            if by_text[name] in fields:
                raise SpecError(f"{cls.word} has {name} twice; give it once")
            fields[by_text[name]] = value
        for text, name in by_text.items():
            if cls.model_fields[name].is_required() and name not in fields:
                raise SpecError(f"{cls.word} needs {text}; write for example {cls._EXAMPLE!r}")
        return cls(**fields)

    _EXAMPLE: ClassVar[str] = ""

    @classmethod
    def _prefix(cls) -> str:
        return f"{cls.word}: "


def _written(name: str, value: Any) -> str:
    if name in _IN_TEXT:
        return seconds_text(value).replace(" ", "")
    if isinstance(value, tuple):
        return "-".join("" if each is None else str(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


class _OnRanks(Fault):
    """A fault of one rank, or of all ranks of a node."""

    rank: CountOrZero | None = None
    """The rank."""
    node: CountOrZero | None = None
    """The node, all of whose ranks are affected; give either this or `rank`."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.rank is None) == (self.node is None):
            told = "gives neither a rank nor a node" if self.rank is None else "gives both a rank and a node"
            raise SpecError(f"{self.word} {told}; give one, for example rank=1")
        return self

    @property
    def who(self) -> str:
        """The rank or the node, as text."""
        return f"node {self.node}" if self.rank is None else f"rank {self.rank}"

    def check(self, job: Job, nodes: int | None, cluster: EmulatedCluster | None) -> None:  # noqa: ARG002
        """Raise `SpecError` if the job has no such rank or node."""
        if self.rank is not None:
            check_rank(self.word, self.rank, job)
        elif nodes is None:
            raise SpecError(
                f"{self.word} names node {self.node}, but the job runs on this machine itself, which is one node; give "
                "a rank, or launch the job on ss.Cluster.emulated(nodes=4)"
            )
        else:
            check_node(self.word, self.node or 0, nodes)


class _Timed(Fault):
    """A fault that occurs at a step, or at a time."""

    step: Count | None = None
    """The step before which the fault occurs."""
    at_s: Seconds | None = None
    """Time of the fault, in seconds after the ranks have begun their first step; give either this or `step`."""

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        if (self.step is None) == (self.at_s is None):
            told = "gives neither a step nor a time" if self.step is None else "gives both a step and a time"
            raise SpecError(f"{self.word} {told}; give one, for example step=40 or at='12 s'")
        return self

    @property
    def when(self) -> str:
        """The step or the time, as text."""
        return (
            f"before step {self.step}" if self.at_s is None else f"{seconds_text(self.at_s)} after the start"
        )


class Kill(_Timed, _OnRanks):
    """SIGKILL of a rank's process, or of a node's agent and the processes of all its ranks."""

    word = "kill"
    _EXAMPLE = "kill rank=2 step=40"

    kind: Literal["kill"] = "kill"
    """Kind of the fault."""
    during: Literal["step", "checkpoint"] = "step"
    """``checkpoint`` kills the rank while it writes its part of the first checkpoint at or after `step`."""

    @model_validator(mode="after")
    def _check_during(self) -> Self:
        if self.during == "checkpoint" and (self.rank is None or self.step is None):
            raise SpecError("kill: during='checkpoint' needs a rank and a step; give rank=... and step=...")
        return self

    @property
    def text(self) -> str:
        """Short description of the fault."""
        if self.during == "checkpoint":
            return f"{self.who} killed while saving the first checkpoint from step {self.step} on"
        return f"{self.who} killed {self.when}"

    def check(self, job: Job, nodes: int | None, cluster: EmulatedCluster | None) -> None:
        """Raise `SpecError` if the fault cannot occur."""
        super().check(job, nodes, cluster)
        if self.step is not None:
            check_step(self.word, self.step, job)
        if self.during == "checkpoint":
            check_saves("kill: during='checkpoint'", job)


def _steps(value: Any) -> Any:
    """Convert ``"20-60"`` or ``"20-"`` to the first and the last step; the last step of ``"20-"`` is None."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    if not isinstance(value, str):
        raise SpecError(
            f"slow: steps={quoted(value)} is not valid; give the first and the last step, such as (20, 60), or "
            "(20, None) for all from 20 on"
        )
    found = re.fullmatch(r"(\d{1,10})-(\d{1,10})?", value.strip())
    if found is None:
        raise SpecError(
            f"slow: steps={quoted(value)} is not valid; write for example 20-60, or 20- for all from 20 on"
        )
    return int(found[1]), None if found[2] is None else int(found[2])


class Slow(_OnRanks):
    """Slowdown of the computation of one rank, or of all ranks of a node, in a range of steps."""

    word = "slow"
    _EXAMPLE = "slow rank=1 factor=3 steps=20-60"

    kind: Literal["slow"] = "slow"
    """Kind of the fault."""
    factor: Annotated[float, Field(gt=1, le=1000)]
    """Factor by which the computation time grows; above 1, at most 1000."""
    steps: Annotated[tuple[Count, Count | None], BeforeValidator(_steps)] = (1, None)
    """First and last slow step; None as the last step stands for the job's last step."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        first, last = self.steps
        if last is not None and last < first:
            raise SpecError(f"slow: steps={self.steps} end before they begin; write ({last}, {first})")
        return self

    @property
    def text(self) -> str:
        """Short description of the fault."""
        first, last = self.steps
        until = f"in steps {first} to {last}" if last is not None else f"from step {first} on"
        return f"{self.who} computes {self.factor:g} times slower {until}"

    def is_on(self, step: int) -> bool:
        """Return whether the rank is slow in `step`."""
        first, last = self.steps
        return first <= step and (last is None or step <= last)

    def check(self, job: Job, nodes: int | None, cluster: EmulatedCluster | None) -> None:
        """Raise `SpecError` if the fault cannot occur."""
        super().check(job, nodes, cluster)
        check_step(self.word, self.steps[0], job)


class DropLink(_Timed):
    """Outage of an emulated link: a node's link, or the connection between two nodes."""

    word = "drop_link"
    _EXAMPLE = "drop_link link=n0-n3 at=12s lasts=5s"

    kind: Literal["drop-link"] = "drop-link"
    """Kind of the fault."""
    link: str
    """``"n3"`` is the link of node 3 to its switch; ``"n0-n3"`` drops only the traffic between nodes 0 and 3."""
    lasts_s: Seconds | None = None
    """Duration of the outage, in seconds; None for the rest of the run."""

    @model_validator(mode="after")
    def _check_link(self) -> Self:
        found = _LINK.fullmatch(self.link)
        if found is None or found[1] == found[2]:
            raise SpecError(
                f"drop_link: link={quoted(self.link)} is not valid; write 'n3' for the link of node 3, or "
                "'n0-n3' for the traffic between nodes 0 and 3"
            )
        return self

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of the node or of the two nodes that `link` names."""
        found = _LINK.fullmatch(self.link)
        assert found is not None
        return tuple(int(node) for node in found.groups() if node is not None)

    @property
    def text(self) -> str:
        """Short description of the fault."""
        lasts = "" if self.lasts_s is None else f" for {seconds_text(self.lasts_s)}"
        return f"link {self.link} dropped {self.when}{lasts}"

    def check(self, job: Job, nodes: int | None, cluster: EmulatedCluster | None) -> None:
        """Raise `SpecError` if the fault cannot occur."""
        if cluster is None:
            raise SpecError(
                f"drop_link names link {self.link!r}, but only emulated clusters have links that can be dropped; "
                "launch the job on ss.Cluster.emulated(nodes=4)"
            )
        for node in self.nodes:
            check_node(self.word, node, len(cluster.nodes))
        if nodes == 1:
            raise SpecError("drop_link has no effect on a cluster of one node; use two nodes or more")
        if self.step is not None:
            check_step(self.word, self.step, job)


class FillDisk(Fault):
    """The disk of a rank is full while it writes its part of a checkpoint."""

    word = "fill_disk"
    _EXAMPLE = "fill_disk rank=0 step=30"

    kind: Literal["fill-disk"] = "fill-disk"
    """Kind of the fault."""
    rank: CountOrZero
    """The rank."""
    step: Count
    """The first checkpoint at or after this step cannot be written."""

    @property
    def text(self) -> str:
        """Short description of the fault."""
        return f"disk of rank {self.rank} full at the first checkpoint from step {self.step} on"

    def check(self, job: Job, nodes: int | None, cluster: EmulatedCluster | None) -> None:  # noqa: ARG002
        """Raise `SpecError` if the fault cannot occur."""
        check_rank(self.word, self.rank, job)
        check_step(self.word, self.step, job)
        check_saves("fill_disk", job)


def check_rank(word: str, rank: int, job: Job) -> None:
    """Raise `SpecError` if the job never has this rank; an elastic job may gain it in a resize."""
    most = job.world_size if job.elastic is None else job.elastic.most
    if rank >= most:
        raise SpecError(f"{word} names rank {rank}, but the job's ranks are 0 to {most - 1}")


def check_node(word: str, node: int, nodes: int) -> None:
    """Raise `SpecError` if this node does not exist."""
    if node >= nodes:
        raise SpecError(f"{word} names node {node}, but the nodes are 0 to {nodes - 1}")


def check_step(word: str, step: int, job: Job) -> None:
    """Raise `SpecError` if the job does not reach the step."""
    if step > job.last_step:
        raise SpecError(
            f"{word} names step {step}, but the job ends after step {job.last_step}; use an earlier step"
        )


def check_saves(what: str, job: Job) -> None:
    """Raise `SpecError` if the job saves no checkpoints."""
    saves = job.checkpoint
    if saves.every is None and not saves.at_end and job.until is None:
        raise SpecError(
            f"{what} has no effect in a job that saves no checkpoints; set for example checkpoint=Checkpoint(every=10)"
        )


AnyFault = Annotated[Kill | Slow | DropLink | FillDisk, Field(discriminator="kind")]
KINDS: dict[str, type[Fault]] = {each.word: each for each in (Kill, Slow, DropLink, FillDisk)}
"""The kinds of faults by the word that begins their short text."""
