"""What every strategy's spec has: its name, how many ranks it runs on, and what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardscope.spec._base import Spec
from shardscope.spec.compression import Carriage

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class StrategySpec(Spec):
    """Base of all strategies. A subclass sets `kind` and may name, in `_variant`, the field that a colon sets."""

    kind: str
    _variant: ClassVar[str | None] = None
    min_ranks: ClassVar[int] = 2
    max_ranks: ClassVar[int | None] = None
    carries: ClassVar[frozenset[Carriage]] = frozenset()
    """Kinds of gradient compression that go with this strategy."""
    has_exchanges: ClassVar[bool] = False
    """Whether packets can meet in more than one way; else each goes where it is unpacked, and that is all."""

    @property
    def label(self) -> str:
        """The short string that stands for this strategy in tables, plots and run names."""
        return self.kind

    def num_data_ranks(self, world_size: int) -> int:
        """Ranks that the global batch is divided over: all, unless some hold no data or all see the same."""
        return world_size

    def role(self, rank: int, world_size: int) -> str | None:  # noqa: ARG002
        """What a rank is in this strategy, in a word or two, such as ``stage 2``; None where all are alike."""
        return None

    @property
    def differs_because(self) -> str | None:
        """Why this strategy need not end at the parameters of one process, as a clause; None where it must."""
        return None

    @property
    def hides_noise_because(self) -> str | None:
        """Why the gradient noise scale cannot be measured under it, as a clause; None where it can."""
        return None

    def drift(self, world_size: int) -> int | None:  # noqa: ARG002
        """Steps that another rank can be ahead when rank 0 begins one: 0 if none ends without it, None for any."""
        return 0

    def suggested_micro_size(self, global_size: int, world_size: int) -> int | None:  # noqa: ARG002
        """A micro-batch that suits this strategy; None where a rank's whole share at once does."""
        return None

    def check(self, job: Job) -> None:
        """Refuse what cannot work, before any process starts.

        Raises:
            SpecError: With the field, the value and the way out.
        """
