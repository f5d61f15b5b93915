"""Gradient compression: which method, how hard, and how compressed gradients meet."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.errors import SpecError
from shardscope.spec import registry
from shardscope.spec.look import YOUR_OWN, Look
from shardscope.spec.method import Method, required

if TYPE_CHECKING:
    from shardscope.spec.job import Job
    from shardscope.spec.optimizer import OptimizerStates

Carriage = Literal["none", "sums", "packets", "layers", "steps"]
"""How a method works on a gradient, which decides what strategies can carry it.

``sums``: each number by itself, into something that may be added up on the way. ``packets``: each number by itself, or
in small blocks, into bytes that must be unpacked before they are added. ``layers``: a tensor at a time. ``steps``: over
the course of several steps, together with the optimizer.
"""

Meeting = Literal["sum", "two-phase", "gather"]
"""Packed gradients are added up on the way; or each rank unpacks, adds and packs again its share; or every rank
receives all of them."""

Shapes = Sequence[tuple[int, ...]]
"""Of the tensors of one bucket."""


class Collective(NamedTuple):
    """One of the collectives by which ranks come to the mean of a bucket.

    ``sum``: a tensor is added up over all ranks, as the strategy does it. ``all_to_all`` and ``all_gather``: each rank
    sends one packet to each other one, different ones or the same.
    """

    op: Literal["sum", "all_to_all", "all_gather"]
    num_elements: int
    """Of the tensor that is summed, or of one packet."""
    element_bytes: int = 1


class Compression(Method):
    """A way to compress gradients, with its settings.

    Derive a method of your own from `PackedCompression` where it packs single numbers, or blocks of them, into bytes:
    it then needs `packet_bytes` and a codec. From this class, where it works otherwise.

    Example:
        >>> Compression("topk", ratio=0.05).settings["selection"]
        'sampled'
    """

    kind = "compression"
    folder = "compressors"

    carriage: ClassVar[Carriage] = "packets"
    """How it works on a gradient."""
    family: ClassVar[str] = "Your own"
    """The heading that it stands under in lists: for example ``Shorter floats``, ``Integers in blocks``, ``Random
    rounding``, ``Signs``, ``Some of the elements`` or ``Low rank``; another one is added to them."""
    look: ClassVar[Look] = YOUR_OWN
    """How figures draw it."""
    is_on: ClassVar[bool] = True
    """Whether anything is compressed at all."""
    survives_overflow: ClassVar[bool] = False
    """Whether infinities come through, by which loss scaling finds its scale."""
    is_fixed: ClassVar[bool] = True
    """Whether what it sends depends neither on the gradients nor on which step it is, a warm-up aside."""
    is_a_vote: ClassVar[bool] = False
    """Whether results are votes, which may not be added up or averaged."""
    codec_passes: ClassVar[float | None] = None
    """Reads and writes of the whole gradient that packing takes, besides the packet and error feedback; None where
    a class does not say, and layouts, whose step time needs it, refuse the method."""
    least_warmup: ClassVar[int] = 0
    """Fewest steps that a given warm-up may shrink to."""

    if TYPE_CHECKING:

        def __init__(self, name: str, **settings: Any) -> None: ...

    # Over the steps of a job.

    @property
    def period(self) -> int:
        """Steps after which what crosses the wire repeats itself."""
        return 1

    def uncompressed(self, steps: int) -> int:  # noqa: ARG002 - most have no warm-up
        """Uncompressed warm-up steps in a job of `steps` steps."""
        return 0

    def at_step(self, step: int) -> Compression:  # noqa: ARG002 - most are the same at each
        """The method as it is set at a step, from 1, where its warm-up goes by the step alone.

        Example:
            >>> Compression("dgc", ratio=0.01, warmup_steps=2).at_step(2).settings["ratio"]
            0.05
            >>> [Compression("powersgd", warmup_steps=2).at_step(step).name for step in (2, 3)]
            ['none', 'powersgd']
        """
        return self

    @property
    def steps_are_alike(self) -> bool:
        """Whether each step exchanges as much as any other, as far as the settings say."""
        return self.period == 1 and self.at_step(1) == self

    def stretched(self, steps: int, to: int) -> Self:
        """For a job of `to` steps instead of `steps`: a given warm-up keeps its share, down to `least_warmup`.

        Example:
            >>> Compression("onebit-adam", warmup_steps=20).stretched(100, to=10).settings["warmup_steps"]
            5
            >>> Compression("powersgd", warmup_steps=20).stretched(100, to=10).settings["warmup_steps"]
            2
        """
        warmup = getattr(self, "warmup_steps", None)
        if not isinstance(warmup, int) or not warmup or to == steps:
            return self
        least = min(warmup, self.least_warmup)
        return self.replace(warmup_steps=min(to, max(least, round(warmup * to / steps))))

    # What it does to a training.

    @property
    def remembers(self) -> bool:
        """Whether it keeps what it has not sent, and sends it later."""
        return bool(getattr(self, "feedback", False))

    def optimizer_states(self, states: OptimizerStates) -> OptimizerStates:
        """What the job's optimizer keeps once it works with this method, given what it keeps alone."""
        return states

    @property
    def differs_because(self) -> str | None:
        """Why a compressed run need not end where an uncompressed one does, as a clause; None where it must."""
        return f"{self.name} changes the gradients that are exchanged"

    @property
    def consensus_step(self) -> float:
        """Under gossip: how far ranks may move towards the mean of what they have told each other, 0 < value <= 1."""
        return 1.0

    @property
    def diverges_because(self) -> str | None:
        """Under gossip: why its noise outweighs what ranks differ by, with the way out; None where it does not."""
        return None

    # What it goes with.

    def check_follows(self, before: str) -> None:
        """Refuse to go on from a checkpoint that another method has saved, where this one must have begun the run.

        Raises:
            SpecError: It freezes what it has learned in its warm-up.
        """

    def check_optimizer(self, job: Job) -> None:
        """Refuse optimizers and clipping that it does not go with.

        Raises:
            SpecError: With the field, the value and the way out.
        """

    def check(self, job: Job) -> None:
        """Refuse what the job's strategy, precision or optimizer cannot go with.

        Raises:
            SpecError: With the field, the value and the way out.
        """
        if not self.is_on:
            return
        if self.carriage not in type(job.strategy).carries:
            raise SpecError(
                f"compression={self.name!r} does not go with strategy={job.strategy.name!r}; {self._way_out(job)}"
            )
        if "exchange" in self.changed and not type(job.strategy).has_exchanges:
            raise SpecError(
                f"compression.exchange={self.settings['exchange']!r} has no effect with "
                f"strategy={job.strategy.name!r}, whose packets go straight to where they are unpacked; leave it out"
            )
        if job.precision == "fp16-mixed" and not self.survives_overflow:
            raise SpecError(
                f"compression={self.name!r} does not go with precision='fp16-mixed', whose gradients overflow by "
                "design; use precision='bf16-mixed', or compression='fp16'"
            )
        self.check_optimizer(job)
        warmup = self.uncompressed(job.steps)
        if warmup >= job.steps:
            raise SpecError(
                f"compression.warmup_steps={warmup} of steps={job.steps} leaves {self.name} no step to compress; use 0 "
                f"to {job.steps - 1}"
            )

    def _way_out(self, job: Job) -> str:
        """What goes with the job's strategy, and which strategies take this method."""
        from shardscope.spec.strategy import strategies  # they name the carriages above

        methods = (registry.require_known(Compression, name) for name in registry.names(Compression))
        carried = [method.name for method in methods if method.carriage in type(job.strategy).carries]
        takers = ", ".join(
            name for name, strategy in strategies().items() if self.carriage in strategy.carries
        )
        if carried:
            return f"it takes {', '.join(carried)}, and {self.name} goes with {takers}"
        if registry.origin(type(job.strategy)) != "built-in":
            kinds = f"frozenset({{{self.carriage!r}}})"
            return (
                f"its class names no kinds of compression that it carries; set for example carries = {kinds}"
            )
        return f"it exchanges no gradients; use compression='none', or one of {takers}"

    # What it sends and what does it.

    @required
    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        """The collectives, one after another, by which all ranks come to the mean of one bucket.

        Args:
            shapes: Of the tensors in the bucket, in their order.
            world_size: W, the ranks.
            plan: Of a method that adapts: each tensor's bits or rank in force. None before any have moved.
        """
        raise NotImplementedError

    def bounds(
        self,
        shapes: Shapes,  # noqa: ARG002
        world_size: int,  # noqa: ARG002
        step: int,  # noqa: ARG002
    ) -> tuple[Sequence[Collective], Sequence[Collective]] | None:
        """Of a method that adapts: `collectives` of the cheapest and of the most expensive plan of a step.

        Args:
            shapes: As for `collectives`.
            world_size: W, the ranks.
            step: From 1.

        Returns:
            None where `collectives` without a plan is what is sent.
        """
        return None

    def bucket_bytes(
        self, shapes: Shapes, world_size: int, *, directions: int = 1, plan: Sequence[int] | None = None
    ) -> Any:
        """Bytes that each rank sends so that all end with the mean of one bucket; an int64 array `(W,)`, by rank.

        Args:
            shapes: Of the tensors in the bucket, in their order.
            world_size: W, the ranks.
            directions: Of the ring that adds up what can be added up.
            plan: As for `collectives`.
        """
        # by name: what methods are asked stands below the formulas
        formulas = import_module("shardscope.analytic.communication.compressed")
        return sum(
            formulas.collective_bytes(each, world_size, directions=directions)
            for each in self.collectives(shapes, world_size, plan=plan)
        )

    def kept_bytes(
        self,
        shapes: Shapes,  # noqa: ARG002
        world_size: int,  # noqa: ARG002
        *,
        scatters: bool = False,  # noqa: ARG002
    ) -> int | None:
        """Bytes that each rank keeps from step to step beside one bucket, once it has been compressed.

        Args:
            shapes: Of what lies in the bucket.
            world_size: W, the ranks that it meets on.
            scatters: Whether each rank comes to its own share of the mean only, or sends packets that others unpack.

        Returns:
            None where a class does not say, or it moves.
        """
        return None

    @property
    def meets(self) -> Meeting:
        """How packed gradients of all ranks become their mean."""
        return "sum"

    def rounds(self, shapes: Shapes, world_size: int) -> int:
        """Messages of one bucket's exchange that wait for one another."""
        found = [each for each in self.collectives(shapes, world_size) if each.num_elements]
        return sum(2 * (world_size - 1) if each.op == "sum" else 1 for each in found)

    @required
    def build(self, job: Job) -> Any:
        """The `shardscope.training.compression.Compressor` of one rank of `job`; None where nothing is compressed."""
        raise NotImplementedError


AnyCompression = Annotated[SerializeAsAny[Compression], BeforeValidator(Compression.resolve)]
"""A field that takes a method of compression, its name, its class or its JSON."""
