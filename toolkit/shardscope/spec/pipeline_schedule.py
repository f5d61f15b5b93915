"""Pipeline schedules: the order of the forward and backward passes of micro-batches on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.errors import SpecError
from shardscope.spec import registry
from shardscope.spec.method import Method, required

Operation = tuple[str, int, int]
"""Type, stage and micro-batch of an operation. Types are ``F``, a forward pass; ``B``, a backward pass; and ``I`` and
``W``, the two parts of a backward pass: the gradients of inputs and those of weights."""


class HeldTerms(NamedTuple):
    """Coefficients of a linear formula for the peak number of micro-batches in flight on a rank."""

    of_left: float
    """Coefficient of the number of ranks from this one to the last, inclusive."""
    of_all: float
    """Coefficient of the total number of ranks."""
    constant: float = 0.0
    is_rounded: bool = False
    """Whether the sum is rounded down to whole micro-batches, as for V-shaped schedules made of building blocks."""
    in_thirds: bool = False
    """Whether every third rank has one micro-batch fewer if the number of ranks is 2 modulo 3."""


class PipelineSchedule(Method):
    """The order of operations on each rank of a pipeline.

    Derive your own schedule from this class: it needs a `name` and `order`. Its bubble and its micro-batches in flight
    are then counted from a table of its operations, and torch's pipeline runtime executes it.

    Example:
        >>> PipelineSchedule("zbv").stage_ranks(3, held=2)
        (0, 1, 2, 2, 1, 0)
    """

    kind = "schedule"
    folder = "pipeline_schedules"

    title: ClassVar[str] = ""
    """Title in plots; if empty, the name is used."""
    source: ClassVar[str] = ""
    """Publication that describes the schedule."""
    year: ClassVar[int] = 9999
    """Year of publication; lists are sorted by it."""
    default_stages: ClassVar[int] = 1
    """Number of stages on each rank by default."""
    least_stages: ClassVar[int] = 1
    most_stages: ClassVar[int | None] = 1
    """Maximum number of stages on each rank; None for any number."""
    v_shaped: ClassVar[bool] = False
    """Whether stages go up and down the ranks, so that the first rank holds both the first and the last stage."""
    splits_backward: ClassVar[bool] = False
    """Whether gradients of inputs and of weights are computed separately."""
    least_per_rank: ClassVar[int] = 0
    """Smallest number of micro-batches per rank that the schedule needs."""
    held_terms: ClassVar[HeldTerms | None] = None
    """Closed form for the micro-batches in flight on a rank; if None, layouts cannot use the schedule."""
    torch_class: ClassVar[str | None] = None
    """The class in `torch.distributed.pipelining.schedules` to run; None if torch's runtime executes `order`."""

    blocks: ClassVar[bool] = False
    """Whether `torch_class` receives a result only when it is needed, and waits for pending sends before it switches
    between forward and backward passes; torch's pipeline runtime does neither."""

    if TYPE_CHECKING:

        def __init__(self, name: str = ..., **settings: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None:
        """Discard inherited closed forms if a subclass overrides `order`, since they describe the inherited order."""
        super().__init_subclass__(**options)
        replaced = super(cls, cls).order  # type: ignore[misc]  # mypy looks for `order` above this class
        if "order" in vars(cls) and not getattr(replaced, "__isabstractmethod__", False):
            for member in ("torch_class", "blocks", "held_terms", "in_flight", "bubble", "ramp"):
                if member not in vars(cls):
                    setattr(cls, member, vars(PipelineSchedule)[member])

    @classmethod
    def check_class(cls) -> None:
        super().check_class()
        least, usual, most = cls.least_stages, cls.default_stages, cls.most_stages
        if not 1 <= least <= usual or (most is not None and usual > most):
            raise SpecError(
                f"{cls.__name__} has least_stages={least}, default_stages={usual} and most_stages={most}; these must "
                "be in ascending order"
            )
        if cls.v_shaped and (least, most) != (2, 2):
            raise SpecError(
                f"{cls.__name__}.v_shaped=True needs two stages on each rank; set default_stages, least_stages and "
                "most_stages to 2"
            )
        if cls.held_terms is not None and not isinstance(cls.held_terms, HeldTerms):
            raise SpecError(
                f"{cls.__name__}.held_terms={cls.held_terms!r} is not a HeldTerms; write HeldTerms(of_left, of_all)"
            )
        if cls.held_terms is not None and cls.bubble is PipelineSchedule.bubble:
            raise SpecError(
                f"{cls.__name__} defines held_terms but not bubble, and layouts need a closed form of both; "
                "define bubble, or leave held_terms out"
            )

    @classmethod
    def heading(cls) -> str:
        """Return the title of the schedule in plots."""
        return cls.title or cls.name

    @classmethod
    def about(cls) -> str:
        """Return a one-line description: the first line of the class's docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]

    @required
    def order(self, rank: int, ranks: int, microbatches: int, held: int) -> Sequence[Operation]:
        """Return the operations of one rank, in execution order.

        Args:
            rank: Rank number, from 0.
            ranks: Number of ranks in the pipeline.
            microbatches: Number of micro-batches in one step.
            held: Number of stages on each rank. Stages are numbered along the pipeline (see `stage_ranks`).
        """
        raise NotImplementedError

    def stage_ranks(self, ranks: int, held: int) -> tuple[int, ...]:
        """Return the rank that holds each stage, in stage order."""
        if self.v_shaped:
            return (*range(ranks), *reversed(range(ranks)))
        return tuple(range(ranks)) * held

    def stages_of(self, virtual_stages: int) -> int:
        """Return the stages per rank: `virtual_stages` if the schedule allows any number, else its default."""
        return max(self.least_stages, virtual_stages) if self.most_stages is None else self.default_stages

    def check_stages(self, held: int) -> None:
        """Reject a number of stages per rank that the schedule does not support.

        Raises:
            SpecError: The number is not supported; the message states one that is.
        """
        least, most = self.least_stages, self.most_stages
        if held < least or (most is not None and held > most):
            several = f"at least {least}" if most is None else f"{least} to {most}"
            bound = f"exactly {least}" if least == most else several
            raise SpecError(
                f"virtual_stages={held}, but schedule={self.name!r} needs {bound} stage{'s' * (most != 1)} per rank; "
                f"use virtual_stages={self.default_stages}"
            )

    def accepts(self, microbatches: int, ranks: int) -> bool:
        """Return whether the schedule supports this number of micro-batches in one step."""
        return microbatches >= self.least_per_rank * ranks

    def needs(self, ranks: int) -> str:
        """Return a description of the supported numbers of micro-batches, such as ``at least 4``."""
        if type(self).accepts is PipelineSchedule.accepts:
            return f"at least {max(1, self.least_per_rank * ranks)}"
        taken = [count for count in range(1, 8 * ranks + 1) if self.accepts(count, ranks)]
        return f"a number such as {', '.join(map(str, taken[:3])) or 'none up to ' + str(8 * ranks)}"

    # Closed forms, whose arguments follow NumPy broadcasting. If they return None, values are counted from a table.

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:  # noqa: ARG002
        """Return a rank's peak activations, in units of one micro-batch's activations; None without a closed form."""
        return None

    def bubble(self, case: Any) -> Any:  # noqa: ARG002
        """Return the longest idle time of a rank, for an `analytic.schedules.closed.Case`; None if unknown."""
        return None

    def ramp(self, case: Any) -> Any:  # noqa: ARG002
        """Return the minimum time lost if ranks synchronise between steps; None if it does not exceed the bubble."""
        return None


AnyPipelineSchedule = Annotated[SerializeAsAny[PipelineSchedule], BeforeValidator(PipelineSchedule.resolve)]
"""A field that accepts a schedule, its name, its class or its JSON."""


def schedules() -> tuple[PipelineSchedule, ...]:
    """Return all known schedules with default settings: built-in schedules by year, then all others."""
    return _in_order(registry.all_of(PipelineSchedule))


@lru_cache(maxsize=8)
def _in_order(known: tuple[type[PipelineSchedule], ...]) -> tuple[PipelineSchedule, ...]:
    """Return the schedules, built-in schedules first, whose indices then do not change if the user adds another."""
    return tuple(
        cls()
        for cls in sorted(known, key=lambda cls: cls.year if registry.origin(cls) == "built-in" else inf)
    )
