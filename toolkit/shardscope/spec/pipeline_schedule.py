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
"""Kind, stage and micro-batch. The kinds are ``F``, a forward pass; ``B``, a backward pass; and ``I`` and ``W``, the
two parts of a backward pass, for the gradients of inputs and of weights."""


class HeldTerms(NamedTuple):
    """Peak number of micro-batches that a rank holds, as coefficients of a formula over arrays of many layouts."""

    of_left: float
    """Coefficient of the number of ranks from this one to the last."""
    of_all: float
    """Coefficient of the total number of ranks."""
    constant: float = 0.0
    is_rounded: bool = False
    """Whether the sum is rounded down, as for V-shaped schedules of building blocks, which hold whole micro-batches."""
    in_thirds: bool = False
    """Whether every third rank holds one micro-batch fewer if the number of ranks is 2 modulo 3."""


class PipelineSchedule(Method):
    """The order of operations on each rank of a pipeline.

    Derive your own schedule from this class: it needs a `name` and `order`. Its bubble and its micro-batches in flight
    are then counted from its table, and torch's pipeline runtime executes it.

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
    """Year of publication, by which lists are sorted."""
    default_stages: ClassVar[int] = 1
    """Number of stages on each rank by default."""
    least_stages: ClassVar[int] = 1
    most_stages: ClassVar[int | None] = 1
    """Largest number of stages that each rank may hold; None for any number."""
    v_shaped: ClassVar[bool] = False
    """Whether the stages run down the ranks and back up, so that the first rank holds the first and the last stage."""
    splits_backward: ClassVar[bool] = False
    """Whether gradients of inputs and of weights are computed separately."""
    least_per_rank: ClassVar[int] = 0
    """Smallest number of micro-batches per rank that the schedule needs."""
    held_terms: ClassVar[HeldTerms | None] = None
    """Micro-batches that a rank holds, in closed form for large layouts; if None, layouts cannot use the schedule."""
    torch_class: ClassVar[str | None] = None
    """The class in `torch.distributed.pipelining.schedules` that runs it; None if torch's runtime runs its `order`."""

    if TYPE_CHECKING:

        def __init__(self, name: str = ..., **settings: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset the inherited closed forms in a subclass that overrides `order`, since they describe another order."""
        super().__init_subclass__(**options)
        replaced = super(cls, cls).order  # type: ignore[misc]  # mypy looks for it above this class
        if "order" in vars(cls) and not getattr(replaced, "__isabstractmethod__", False):
            for member in ("torch_class", "held_terms", "in_flight", "bubble", "ramp"):
                if member not in vars(cls):
                    setattr(cls, member, vars(PipelineSchedule)[member])

    @classmethod
    def check_class(cls) -> None:
        super().check_class()
        least, usual, most = cls.least_stages, cls.default_stages, cls.most_stages
        if not 1 <= least <= usual or (most is not None and usual > most):
            raise SpecError(
                f"{cls.__name__} has least_stages={least}, default_stages={usual} and most_stages={most}; let each be "
                "at most the next"
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
                f"{cls.__name__}.held_terms is for layouts too large to count, which need bubble in closed form too; "
                "define it, or leave held_terms out"
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
        """Refuse a number of stages per rank that the schedule does not support.

        Raises:
            SpecError: The message states the supported number.
        """
        least, most = self.least_stages, self.most_stages
        if held < least or (most is not None and held > most):
            several = f"at least {least}" if most is None else f"{least} to {most}"
            bound = f"exactly {least}" if least == most else several
            raise SpecError(
                f"virtual_stages={held}: the {self.name} schedule needs {bound} stage{'s' * (most != 1)} per rank; "
                f"use virtual_stages={self.default_stages}"
            )

    def accepts(self, microbatches: int, ranks: int) -> bool:
        """Whether the schedule supports this number of micro-batches in one step."""
        return microbatches >= self.least_per_rank * ranks

    def needs(self, ranks: int) -> str:
        """Describe the supported numbers of micro-batches in words."""
        if type(self).accepts is PipelineSchedule.accepts:
            return f"at least {max(1, self.least_per_rank * ranks)}"
        taken = [count for count in range(1, 8 * ranks + 1) if self.accepts(count, ranks)]
        return f"a number such as {', '.join(map(str, taken[:3])) or 'none up to ' + str(8 * ranks)}"

    # Closed forms; arguments follow NumPy broadcasting. Without a closed form, values are counted from the table.

    def in_flight(self, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Any:  # noqa: ARG002
        """Peak activations of a rank, in units of one micro-batch's activations on it; None without a closed form."""
        return None

    def bubble(self, case: Any) -> Any:  # noqa: ARG002
        """Idle time of the rank that waits longest, for an `analytic.schedules.paths.Case`; None if not known."""
        return None

    def ramp(self, case: Any) -> Any:  # noqa: ARG002
        """Minimum time lost if all ranks synchronise between steps; None if it does not exceed the bubble."""
        return None


AnyPipelineSchedule = Annotated[SerializeAsAny[PipelineSchedule], BeforeValidator(PipelineSchedule.resolve)]
"""A field that accepts a schedule, its name, its class or its JSON."""


def schedules() -> tuple[PipelineSchedule, ...]:
    """Return all known schedules with default settings: built-in ones by year, then others."""
    return _in_order(registry.all_of(PipelineSchedule))


@lru_cache(maxsize=8)
def _in_order(known: tuple[type[PipelineSchedule], ...]) -> tuple[PipelineSchedule, ...]:
    """Sort built-in schedules first, so that their indices do not change when the user adds another."""
    return tuple(
        cls()
        for cls in sorted(known, key=lambda cls: cls.year if registry.origin(cls) == "built-in" else inf)
    )
