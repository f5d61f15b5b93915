"""Gradient compression: the method, its settings, and the collectives that average compressed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.errors import SpecError
from shardscope.spec import registry
from shardscope.spec.look import YOUR_OWN, MethodStyle
from shardscope.spec.method import Method, required

if TYPE_CHECKING:
    from shardscope.spec.job import Job
    from shardscope.spec.optimizer import OptimizerStates

Carriage = Literal["none", "sums", "packets", "layers", "steps"]
"""How a compression method processes a gradient, which determines the strategies that support the method.

``sums``: element by element, into numbers that an all-reduce can add. ``packets``: element by element or in small
blocks, into bytes that must be unpacked before they are added. ``layers``: one tensor at a time. ``steps``: over
several steps, together with the optimizer.
"""

Meeting = Literal["sum", "two-phase", "gather"]
"""How packed gradients are averaged.

``sum``: an all-reduce adds them in packed form. ``two-phase``: each rank unpacks, adds and repacks its own shard.
``gather``: every rank gathers all packets and unpacks them.
"""

Shapes = Sequence[tuple[int, ...]]
"""Shapes of the tensors in one bucket."""


class Collective(NamedTuple):
    """One of the collectives that compute the mean of a bucket over the ranks.

    ``sum``: an all-reduce of a tensor with the strategy's algorithm. ``all_to_all`` and ``all_gather``: each rank
    sends one packet to every other rank, a different packet to each or the same to all.
    """

    op: Literal["sum", "all_to_all", "all_gather"]
    num_elements: int
    """Number of elements in the tensor that is summed, or in one packet."""
    element_bytes: int = 1


class Compression(Method):
    """A gradient-compression method with its settings.

    Derive your own method from `PackedCompression` if it packs single numbers or blocks of numbers into bytes, and
    define `packet_bytes` and a codec. Derive any other method from this class.

    Example:
        >>> Compression("topk", ratio=0.05).settings["selection"]
        'sampled'
    """

    kind = "compression"
    folder = "compressors"

    carriage: ClassVar[Carriage] = "packets"
    """How the method processes a gradient; see `Carriage`."""
    family: ClassVar[str] = "Your own"
    """Heading under which lists show the method: for example ``Shorter floats``, ``Block quantization``,
    ``Stochastic rounding``, ``Signs``, ``Sparsification`` or ``Low rank``. Any other text becomes a new heading."""
    look: ClassVar[MethodStyle] = YOUR_OWN
    """Colour, dash and marker in plots."""
    is_on: ClassVar[bool] = True
    """Whether the method compresses at all; False for ``none`` only."""
    survives_overflow: ClassVar[bool] = False
    """Whether infinities survive compression, so that dynamic loss scaling can detect them."""
    is_fixed: ClassVar[bool] = True
    """Whether the number of bytes sent is independent of the gradients and, after any warm-up, of the step."""
    is_a_vote: ClassVar[bool] = False
    """Whether results are majority votes on signs, which must not be added or averaged."""
    codec_passes: ClassVar[float | None] = None
    """Number of times that packing reads or writes the whole gradient, not counting the packet and error feedback. None
    if unknown; layouts then reject the method, because their step time cannot be predicted without it."""
    least_warmup: ClassVar[int] = 0
    """Smallest number of steps to which `stretched` may shrink a warm-up."""

    if TYPE_CHECKING:

        def __init__(self, name: str, **settings: Any) -> None: ...

    # Behaviour over the steps of a job.

    @property
    def period(self) -> int:
        """Number of steps after which the pattern of communication repeats."""
        return 1

    def uncompressed(self, steps: int) -> int:  # noqa: ARG002 - most methods have no warm-up
        """Return the number of uncompressed warm-up steps in a job of `steps` steps."""
        return 0

    def at_step(self, step: int) -> Compression:  # noqa: ARG002 - most methods are the same at every step
        """Return the method as it works at `step` (1-based): with changed settings or ``none`` during a warm-up.

        A method is returned unchanged if its warm-up depends on more than the step number.

        Example:
            >>> Compression("dgc", ratio=0.01, warmup_steps=2).at_step(2).settings["ratio"]
            0.05
            >>> [Compression("powersgd", warmup_steps=2).at_step(step).name for step in (2, 3)]
            ['none', 'powersgd']
        """
        return self

    @property
    def steps_are_alike(self) -> bool:
        """Whether all steps exchange the same number of bytes, as far as the settings determine this number."""
        return self.period == 1 and self.at_step(1) == self

    def stretched(self, steps: int, to: int) -> Self:
        """Return the method for a job of `to` steps instead of `steps`, with the same fraction of warm-up steps.

        The warm-up does not shrink below `least_warmup`.

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

    # Effect on training.

    @property
    def remembers(self) -> bool:
        """Whether the method keeps the unsent part of a gradient and adds it to a later gradient (error feedback)."""
        return bool(getattr(self, "feedback", False))

    def optimizer_states(self, states: OptimizerStates) -> OptimizerStates:
        """Return the states that the job's optimizer keeps with this method; `states` are its states without
        compression.
        """
        return states

    @property
    def differs_because(self) -> str | None:
        """Clause that says why compression may change the final parameters of a run; None if it cannot."""
        return f"{self.name} changes the gradients that are exchanged"

    @property
    def consensus_step(self) -> float:
        """With gossip: size of a rank's step towards the mean of the exchanged values; 0 < value <= 1."""
        return 1.0

    @property
    def diverges_because(self) -> str | None:
        """With gossip: error message if compression noise exceeds the differences between ranks; None otherwise."""
        return None

    # Compatibility checks.

    def check_follows(self, before: str) -> None:
        """Reject another method's checkpoint, if this method must have been used from the first step.

        Args:
            before: Name of the compression method of the run that saved the checkpoint.

        Raises:
            SpecError: The method freezes state that it computes during its warm-up.
        """

    def check_optimizer(self, job: Job) -> None:
        """Reject optimizers and gradient clipping that are incompatible with this method.

        Raises:
            SpecError: The combination is invalid; the message states the field, its value and a remedy.
        """

    def check(self, job: Job) -> None:
        """Reject a job whose strategy, precision or optimizer is incompatible with this method.

        Raises:
            SpecError: The combination is invalid; the message states the field, its value and a remedy.
        """
        if not self.is_on:
            return
        if self.carriage not in type(job.strategy).carries:
            raise SpecError(
                f"compression={self.name!r} cannot be combined with strategy={job.strategy.name!r}; "
                f"{self._way_out(job)}"
            )
        if "exchange" in self.changed and not type(job.strategy).has_exchanges:
            raise SpecError(
                f"compression.exchange={self.settings['exchange']!r} has no effect with "
                f"strategy={job.strategy.name!r}, which sends packets to the ranks that unpack them; leave it out"
            )
        if job.precision == "fp16-mixed" and not self.survives_overflow:
            raise SpecError(
                f"compression={self.name!r} cannot be combined with precision='fp16-mixed', because it would "
                "hide gradient overflows from loss scaling; use precision='bf16-mixed', or compression='fp16'"
            )
        self.check_optimizer(job)
        warmup = self.uncompressed(job.steps)
        if warmup >= job.steps:
            raise SpecError(
                f"compression.warmup_steps={warmup} covers all steps={job.steps}, so {self.name} would never compress; "
                f"use 0 to {job.steps - 1}"
            )

    def _way_out(self, job: Job) -> str:
        """Describe which methods the job's strategy supports, and which strategies support this method."""
        from shardscope.spec.strategy import strategies  # that module imports `Carriage` from this one

        methods = (registry.require_known(Compression, name) for name in registry.names(Compression))
        carried = [method.name for method in methods if method.carriage in type(job.strategy).carries]
        takers = ", ".join(
            name for name, strategy in strategies().items() if self.carriage in strategy.carries
        )
        if carried:
            return f"use one of {', '.join(carried)}, or for {self.name} one of the strategies {takers}"
        if registry.origin(type(job.strategy)) != "built-in":
            kinds = f"frozenset({{{self.carriage!r}}})"
            return f"the strategy's class declares no supported types; set for example carries = {kinds}"
        return (
            f"this strategy exchanges no gradients; use compression='none', or one of the strategies {takers}"
        )

    # Traffic, and the object that compresses.

    @required
    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        """Return the collectives, in execution order, that compute the mean of one bucket over all ranks.

        Args:
            shapes: Shapes of the tensors in the bucket, in order.
            world_size: W, the number of ranks.
            plan: For an adaptive method: the current bits or rank of each tensor. None before the first change.
        """
        raise NotImplementedError

    def bounds(
        self,
        shapes: Shapes,  # noqa: ARG002
        world_size: int,  # noqa: ARG002
        step: int,  # noqa: ARG002
    ) -> tuple[Sequence[Collective], Sequence[Collective]] | None:
        """For an adaptive method, return `collectives` for the cheapest and for the most expensive plan at a step.

        Args:
            shapes: As for `collectives`.
            world_size: W, the number of ranks.
            step: Step number, from 1.

        Returns:
            The two sequences of collectives; None if `collectives` without a plan is exact at this step.
        """
        return None

    def bucket_bytes(
        self, shapes: Shapes, world_size: int, *, directions: int = 1, plan: Sequence[int] | None = None
    ) -> Any:
        """Return the bytes that each rank sends to average one bucket on all ranks, as an int64 array `(W,)`.

        Args:
            shapes: Shapes of the tensors in the bucket, in order.
            world_size: W, the number of ranks.
            directions: Number of directions, 1 or 2, in which the ring that computes the sums sends.
            plan: As for `collectives`.
        """
        # imported by name to avoid a cycle: the formulas import `spec`
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
        """Return the bytes that each rank keeps between steps for one bucket that it has compressed, such as residuals.

        Args:
            shapes: Shapes of the tensors in the bucket.
            world_size: W, the number of ranks that average the bucket.
            scatters: Whether each rank obtains only its own shard of the mean, or other ranks unpack its packets.

        Returns:
            The number of bytes; None if it is unknown or varies.
        """
        return None

    @property
    def meets(self) -> Meeting:
        """How the packed gradients of all ranks are averaged."""
        return "sum"

    def rounds(self, shapes: Shapes, world_size: int) -> int:
        """Return the number of consecutive messages in one bucket's exchange; each waits for the previous one."""
        found = [each for each in self.collectives(shapes, world_size) if each.num_elements]
        return sum(2 * (world_size - 1) if each.op == "sum" else 1 for each in found)

    @required
    def build(self, job: Job) -> Any:
        """Build the `shardscope.training.compression.Compressor` for one rank of `job`; None without compression."""
        raise NotImplementedError


AnyCompression = Annotated[SerializeAsAny[Compression], BeforeValidator(Compression.resolve)]
"""A field that accepts a compression method, its name, its class or its JSON."""


def compression_names() -> tuple[str, ...]:
    """Return the names of all methods that a layout accepts, ``none`` first."""
    known = [method for method in registry.all_of(Compression) if method.codec_passes is not None]
    return tuple(method.name for method in sorted(known, key=lambda method: method.is_on))


def layout_compression(value: Any) -> Compression:
    """Convert a layout's `compression` field (a method, class, name or JSON) to a compression method.

    Raises:
        SpecError: The method does not exist, or its class does not state `codec_passes`.

    Example:
        >>> layout_compression("powersgd").rank
        4
    """
    found: Compression = Compression.resolve(value)
    if found.is_here and found.codec_passes is None:
        raise SpecError(
            f"compression={found.name!r} does not state how often compression reads or writes the "
            "gradient, which is needed to predict the step time; set codec_passes in its class, or use "
            "one of "
            f"{', '.join(compression_names())}"
        )
    return found


AnyLayoutCompression = Annotated[SerializeAsAny[Compression], BeforeValidator(layout_compression)]
"""A field of layouts that accepts a compression method, its name, its class, or its JSON."""
