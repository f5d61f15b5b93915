"""Several axes of parallelism at once: each group of tensor-parallel ranks holds one replica of the model in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import BeforeValidator, Field

from shardscope.errors import SpecError, quoted
from shardscope.spec.compression import Carriage
from shardscope.spec.divisors import divisors_text
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count
from shardscope.spec.strategy import AnyStrategy, Strategy, strategies_where
from shardscope.spec.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class Mesh(Strategy):
    """Divides each replica of the model over a group of ranks, and the batch over the groups.

    The ranks are a mesh: rank r has index ``r // tensor`` on the data axis and ``r % tensor`` on the tensor axis. Along
    the data axis, `data` is the same strategy as in a job with this axis only. Along the tensor axis, the model's
    layers are divided by columns and rows (Shoeybi et al., arXiv 1909.08053): each rank computes with its part of a
    layer's weights, and ranks sum activations, and gradients of activations, in each pass.

    Example:
        >>> Strategy("mesh", data="zero-1", tensor=2).num_data_ranks(8)
        4
    """

    name = "mesh"
    family = "Several axes"
    look = MethodStyle("#7a8b1f", "dashdot", "cross")
    carries = frozenset(get_args(Carriage))
    has_exchanges = True
    is_composite: ClassVar[bool] = True

    data: AnyStrategy = Field(default_factory=lambda: Strategy("ring"))
    """Strategy of the data axis: one whose ranks all apply the same mean gradient."""
    tensor: Count = 1
    """Number of ranks that hold one replica of the model in parts; must divide `world_size`."""
    sequence_parallel: bool = False
    """Divide the activations between divided layers over the tensor ranks too, along the sequence."""
    tensor_plan: Annotated[TensorPlan | None, BeforeValidator(TensorPlan.resolve)] = None
    """Which layers are divided, by name; None uses the plan of the model's own method `tensor_plan`."""

    def shape(self, world_size: int) -> dict[str, int]:
        """Return the number of ranks along each axis, the outermost axis first."""
        return {"data": world_size // self.tensor, "tensor": self.tensor}

    def num_data_ranks(self, world_size: int) -> int:
        """Return the number of replicas, each of which gets its share of the batch."""
        return max(world_size // self.tensor, 1)

    def data_job(self, job: Job) -> Job:
        """Return the job of the ranks along the data axis: the same job, on as many ranks as there are replicas."""
        ranks = self.num_data_ranks(job.world_size)
        strategy = self.data if ranks > 1 else Strategy("single")
        return job.replace(strategy=strategy, world_size=ranks, elastic=None)

    @property
    def label(self) -> str:
        """The data axis's strategy and the number of tensor ranks, such as ``zero-1+tensor2``."""
        return f"{self.data.label}+tensor{self.tensor}"

    @property
    def zero_stage(self) -> int | None:  # type: ignore[override] # that of the strategy in a setting
        """The ZeRO stage of the data axis."""
        return self.data.zero_stage

    @property
    def held_stage(self) -> int | None:
        """The ZeRO stage that describes a rank's memory during a step."""
        return self.data.held_stage

    @property
    def differs_because(self) -> str | None:
        """Clause that says why final parameters may differ from those of a single process; None if they cannot."""
        return self.data.differs_because

    @property
    def hides_noise_because(self) -> str | None:
        """Why the gradient noise scale cannot be measured: no rank has the whole gradient of its samples."""
        return (
            "a rank has a part of its samples' gradient" if self.tensor > 1 else self.data.hides_noise_because
        )

    @property
    def needs_even_because(self) -> str | None:
        """Why all replicas need equal shares of the batch."""
        return (
            "ranks of a tensor group pass through the model together"
            if self.tensor > 1
            else self.data.needs_even_because
        )

    @property
    def exchanges_in_passes(self) -> bool:
        """Whether ranks communicate in every pass: they do along the tensor axis."""
        return self.tensor > 1 or self.data.exchanges_in_passes

    def degrees(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the degrees of the layout: those of the data axis, and the number of tensor ranks."""
        ranks = self.num_data_ranks(world_size)
        data = self.data.degrees(ranks) if ranks > 1 else {"data": 1}
        if data is None:
            return None
        return {**data, "tensor": self.tensor, "sequence_parallel": self.sequence_parallel}

    def check(self, job: Job) -> None:
        """Reject numbers of ranks that are not a mesh, and what the axes cannot do together yet."""
        if job.world_size % self.tensor:
            raise SpecError(
                f"strategy.tensor={self.tensor} does not divide world_size={job.world_size}; use one of "
                f"{divisors_text(job.world_size, near=self.tensor)}"
            )
        if not self.data.composes and self.num_data_ranks(job.world_size) > 1:
            able = ", ".join(strategies_where(lambda strategy: strategy.composes))
            raise SpecError(
                f"strategy.data={quoted(self.data.label)} cannot be the data axis of a mesh, because its ranks do not "
                f"apply the same mean gradient; use one of {able}"
            )
        if self.tensor > 1:
            self._check_tensor(job)
        self.data_job(job)

    def _check_tensor(self, job: Job) -> None:
        """Reject what is not available yet with a model in parts."""
        if self.sequence_parallel:
            raise SpecError("strategy.sequence_parallel=True is not available in jobs yet; leave it out")
        if job.compression.is_on:
            raise SpecError(
                f"compression={job.compression.name!r} cannot be combined with strategy.tensor={self.tensor}: "
                "gradients are compressed in buckets that mix divided and whole tensors, whose copies would drift "
                "apart; use compression='none'"
            )
        uneven = next(
            (name for name in ("replicas", "shards") if getattr(self.data, name, None) not in (None, 1)), None
        )
        if uneven is not None:
            raise SpecError(
                f"strategy.data.{uneven}={getattr(self.data, uneven)} is not available with "
                f"strategy.tensor={self.tensor} yet; leave {uneven} out"
            )

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.mesh._torch import built

        return built(self, job, context)
