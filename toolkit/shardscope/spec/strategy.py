"""Strategies: how the work is distributed over the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, get_args

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.errors import SpecError, quoted
from shardscope.spec import registry
from shardscope.spec.compression import Carriage
from shardscope.spec.look import YOUR_OWN, Arrangement, MethodStyle
from shardscope.spec.method import Method, required

if TYPE_CHECKING:
    from shardscope.spec.job import Job

FAMILIES = (
    "One process", "A central server", "All-reduce", "Without a centre", "Layers apart", "State in shards",
)  # fmt: skip
"""Headings of the built-in strategies in lists, in the order in which such systems appeared."""


_CARGO = {
    "ring_all_gather": "parameters", "all_gather": "parameters", "server_pull": "parameters", "send": "activations",
    "server_control": "message headers", "agreement": "digests", "broadcast": "buffers", "barrier": "barrier",
}  # fmt: skip


class Work(NamedTuple):
    """Compute and idle time of one rank in a step.

    Both are fractions of the time that the slowest device would need for the rank's samples if it held the whole model.
    """

    computing: float = 1.0
    waiting: float = 0.0
    """Idle time that the schedule causes, such as a pipeline's bubble."""


class Strategy(Method):
    """A way to distribute the work over the ranks, with its settings.

    A short string is accepted in place of a strategy: ``"ring"`` is ``Ring()``. The text after a colon sets the field
    that the class names in `variant`: ``"ring:2"`` is ``Ring(directions=2)``.

    Derive your own strategy from this class, or from `BucketedStrategy` if it exchanges gradients in buckets during the
    backward pass. `build` makes the object that trains on one rank.

    Example:
        >>> Strategy("ring", directions=2).label
        'ring:2'
    """

    kind = "strategy"
    folder = "strategies"

    variant: ClassVar[str | None] = None
    """Name of the setting that follows a colon in the short string; None if there is none."""
    family: ClassVar[str] = "Your own"
    """Heading under which lists show the strategy: one of `FAMILIES`, or a new one."""
    look: ClassVar[MethodStyle] = YOUR_OWN
    """Colour, dash and marker in plots."""
    min_ranks: ClassVar[int] = 2
    max_ranks: ClassVar[int | None] = None
    carries: ClassVar[frozenset[Carriage]] = frozenset()
    """Types of gradient compression that this strategy supports; see `Carriage`."""
    has_exchanges: ClassVar[bool] = False
    """Whether the compression's setting `exchange` can select how packets are exchanged. Otherwise each packet is sent
    directly to the rank that unpacks it."""
    composes: ClassVar[bool] = False
    """Whether the strategy can be the data axis of a mesh: all ranks apply the same mean gradient in every step."""
    is_composite: ClassVar[bool] = False
    """Whether the strategy is made of others, one per axis; lists of strategies of one axis leave it out."""
    zero_stage: ClassVar[int | None] = None
    """The ZeRO stage whose memory formulas apply to a rank, 0 for whole replicas; None if none applies."""

    if TYPE_CHECKING:

        def __init__(self, name: str = ..., **settings: Any) -> None: ...

    @classmethod
    def by_name(cls, /, *args: Any, **fields: Any) -> Any:
        """Return the strategy with this name and these settings; the name may include a variant, as in ``ring:2``."""
        fields = cls._with_positional(args, fields) if args else fields
        name = fields.get("name")
        if isinstance(name, str) and ":" in name:
            said = cls._of_short_string(name)
            for setting in said.keys() & fields.keys() - {"name"}:
                raise SpecError(
                    f"strategy={quoted(name)} already sets {setting}, which is also given as "
                    f"{quoted(fields[setting])}; give it once"
                )
            fields = {**fields, **said}
        return super().by_name(**fields)

    @classmethod
    def _of_short_string(cls, text: str) -> dict[str, Any]:
        name, _, variant = text.partition(":")
        method = registry.require_known(cls, name if registry.find(cls, name) else text)
        if method.variant is None:
            raise SpecError(f"strategy={quoted(text)}: {name!r} has no variants; use {name!r}")
        taken = method.model_fields[method.variant].annotation
        is_method = isinstance(taken, type) and issubclass(taken, Method)
        value = int(variant) if re.fullmatch("[0-9]{1,18}", variant) and not is_method else variant
        return {"name": name, method.variant: value} if variant else {"name": name}

    @classmethod
    def check_class(cls) -> None:
        super().check_class()
        if cls.variant is not None and cls.variant not in cls.model_fields:
            raise SpecError(
                f"{cls.__name__}.variant={cls.variant!r} is not one of its settings; use one, or leave variant out"
            )
        strange = set(cls.carries) - set(get_args(Carriage))
        if strange:
            raise SpecError(
                f"{cls.__name__}.carries contains {quoted(min(strange, key=str))}, which is not valid; use "
                f"{', '.join(get_args(Carriage))}"
            )
        if not isinstance(cls.family, str):
            raise SpecError(f"{cls.__name__}.family={cls.family!r} is not a string; give a heading")

    @property
    def label(self) -> str:
        """The short string of this strategy in tables, plots and run names."""
        return self.name

    def num_data_ranks(self, world_size: int) -> int:
        """Return the number of ranks that share the batch: all, unless some receive no data or the same data."""
        return world_size

    def num_state_ranks(self, world_size: int) -> int:
        """Return the number of ranks with the same part of the model, over which ZeRO partitions its states."""
        return self.num_data_ranks(world_size)

    def data_index(self, rank: int, world_size: int) -> int:  # noqa: ARG002
        """Return a rank's place among the ranks that share the batch and, with ZeRO, the model's states."""
        return rank

    @property
    def of_data(self) -> Strategy:
        """The strategy of the ranks that share the batch: this one, unless it is made of others."""
        return self

    def of_replica(self, world_size: int) -> tuple[Strategy, int]:  # noqa: ARG002
        """Return the strategy and the number of ranks of one replica of the model, whose step is traced."""
        return Strategy.by_name("single"), 1

    def role(self, rank: int, world_size: int) -> str | None:  # noqa: ARG002
        """Return the role of a rank in this strategy, such as ``stage 2``; None if all ranks have the same role."""
        return None

    @property
    def differs_because(self) -> str | None:
        """Clause that says why final parameters may differ from those of a single process; None if they cannot."""
        return None

    @property
    def hides_noise_because(self) -> str | None:
        """Clause that says why the gradient noise scale cannot be measured with this strategy; None if it can."""
        return None

    @property
    def needs_even_because(self) -> str | None:
        """Clause that says why all ranks need equal shares of the batch; None if gradients are weighted by samples."""
        return None

    @property
    def held_stage(self) -> int | None:
        """ZeRO stage that describes a rank's memory during a step; differs from `zero_stage` if each rank keeps all
        parameters.
        """
        return self.zero_stage

    @property
    def exchanges_in_passes(self) -> bool:
        """Whether ranks communicate in every forward or backward pass, so all need the same number of micro-batches."""
        return (self.zero_stage or 0) >= 2

    @property
    def num_dropped(self) -> int:
        """Number of the slowest ranks that a step does not wait for, because it drops their gradients."""
        return 0

    @property
    def unwaited_because(self) -> str | None:
        """Clause that says why the other ranks do not wait for a slow rank; None if they eventually do."""
        return None

    @property
    def is_asynchronous(self) -> bool:
        """Whether ranks take steps at their own speeds, without waiting for the gradients of all ranks."""
        return False

    def drift(self, world_size: int) -> int | None:  # noqa: ARG002
        """Return how many steps a rank can be ahead of rank 0: 0 if ranks stay synchronised; None if unbounded."""
        return 0

    def suggested_micro_batch(self, global_batch: int, world_size: int) -> int | None:  # noqa: ARG002
        """Return a suitable micro-batch size; None if a rank should process its whole share at once."""
        return None

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return the fields of the `Layout` that corresponds to this strategy; None if there is none.

        Example:
            >>> Strategy("zero-3", replicas=2).degrees(8)
            {'data': 8, 'zero': 3, 'shard': 4}
        """
        return None

    def check(self, job: Job) -> None:
        """Reject a job that cannot run with this strategy, before any process starts.

        Raises:
            SpecError: The job cannot run; the message states the field, its value and a remedy.
        """

    # Traffic and memory, and the object that trains.

    def exchanged_bytes(
        self,
        gradient_bytes: int,  # noqa: ARG002
        world_size: int,  # noqa: ARG002
        *,
        micro_batches: int = 1,  # noqa: ARG002
    ) -> float | None:
        """Return the total bytes of gradients and parameters that all ranks send in a step, uncompressed.

        This is the textbook total, without headers, norms and padding; compressed runs are compared with it.

        Args:
            gradient_bytes: S, bytes of one complete uncompressed gradient.
            world_size: W, the number of ranks.
            micro_batches: Forward and backward passes per step.

        Returns:
            The number of bytes; None if gradients are not exchanged, or if the total is unknown.
        """
        return None

    def traffic(self, step: Any) -> Any:  # noqa: ARG002
        """Return the traffic that each rank sends in one step, under the names that a run's counters use.

        Args:
            step: The `shardscope.analytic.job_step.JobStep` of a job with this strategy.

        Returns:
            Bytes and messages by collective and rank, a `shardscope.analytic.communication.Traffic`; None if unknown.
        """
        return None

    def plan(self, step: Any) -> Any:  # noqa: ARG002
        """Return the messages of one step, one by one; they add up to `traffic`.

        Args:
            step: The `shardscope.analytic.job_step.JobStep` of a job with this strategy.

        Returns:
            A `shardscope.analytic.communication.plan.StepPlan`; None if unknown.
        """
        return None

    def pipeline_step(self, step: Any) -> Any:  # noqa: ARG002
        """Return the step of the ranks that hold different layers, one for each; None if every rank has all layers.

        Args:
            step: The `shardscope.analytic.job_step.JobStep` of a job with this strategy.
        """
        return None

    def shape(self, world_size: int) -> dict[str, int]:  # noqa: ARG002
        """Return the number of ranks along each axis, the outermost axis first; empty if there is one axis only, whose
        collectives have no axis in their names.
        """
        return {}

    def arrangement(self, world_size: int) -> Arrangement:
        """Return how drawings arrange the ranks: in a grid if they have several axes, or else in a circle."""
        axes = tuple(self.shape(world_size).items())
        return Arrangement("grid", axes=axes) if axes else Arrangement()

    def cargo(self, collective: str) -> str:
        """Return a word for the data that a collective sends, such as ``gradients``."""
        return _CARGO.get(collective, "gradients")

    def states(self, step: Any) -> Any:  # noqa: ARG002
        """Return each rank's memory for parameters, gradients, optimizer state and buffers in one step.

        Args:
            step: The `shardscope.analytic.job_step.JobStep` of a job with this strategy.

        Returns:
            Bytes by type of memory and rank, a `shardscope.analytic.memory.RankStates`; None if unknown.
        """
        return None

    def activations(self, step: Any) -> list[float] | None:
        """Return the peak bytes that each rank saves for its backward passes, by rank; None if unknown.

        Args:
            step: The `shardscope.analytic.job_step.JobStep` of a job with this strategy.
        """
        return None if step.saved_bytes is None else [step.saved_bytes] * step.world_size

    def work(self, step: Any) -> list[Work]:
        """Return the compute time of each rank, and the idle time that the schedule causes, as fractions (see `Work`).

        Args:
            step: The `shardscope.analytic.job_step.JobStep` of a job with this strategy.
        """
        return [Work(step.slow(rank)) for rank in range(step.world_size)]

    @required
    def build(self, job: Job, context: Any) -> Any:
        """Build the `shardscope.training.strategies.RankStrategy` that trains on one rank of `job`.

        Args:
            job: A job with this strategy.
            context: The rank's `shardscope.training.context.RankContext`: its number, device, process group and meter.
        """
        raise NotImplementedError


def strategies() -> dict[str, type[Strategy]]:
    """Return all known strategies of one axis by name, sorted by family."""
    known = [method for method in registry.all_of(Strategy) if not method.is_composite]
    families = dict.fromkeys([*FAMILIES, *(method.family for method in known)])
    order = {family: place for place, family in enumerate(families)}
    return {method.name: method for method in sorted(known, key=lambda method: order[method.family])}


def strategies_where(is_so: Callable[[Any], bool]) -> list[str]:
    """Return the names of the strategies that satisfy a predicate at their default settings."""
    return [name for name, method in strategies().items() if is_so(method())]


AnyStrategy = Annotated[SerializeAsAny[Strategy], BeforeValidator(Strategy.resolve)]
"""A field that accepts a strategy, its short string, its class or its JSON."""
