"""Parts of a job: the batch, what to record, user-defined functions, and the names of precisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, PrivateAttr, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors_text
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.shards import Shards
from shardscope.spec.shares import MEASURED, reader_of_shares, samples_by_share


class Batch(Spec):
    """Sizes of the global batch, for one optimizer step, and of the micro-batch, for one forward pass."""

    _positional = "global_batch"

    global_batch: Count = 64
    """Samples in one optimizer step over all ranks. 1 to 2147483647, divisible by the number of ranks, or in proportion
    to `shares`."""
    micro_batch: Count | None = None
    """Samples in one forward pass on one rank; None uses the rank's whole share, or in a pipeline a size that suits the
    schedule. Must divide the rank's share."""
    shares: Annotated[
        tuple[Count, ...] | Literal["measured"] | None,
        BeforeValidator(reader_of_shares("batch.shares", MEASURED)),
    ] = None
    """Shares of the ranks in the global batch, for ranks of different speeds: one number for each, such as
    ``(2, 2, 1, 1)``; or ``"measured"``, which starts with equal shares, and after a few steps divides the batch by
    measured speed, in whole micro-batches. Gradients are weighted by samples, so the trained weights are the
    same as with equal shares. None gives all ranks equal shares."""
    rebalance_every: Count | None = None
    """With ``shares="measured"``: number of steps between two divisions of the batch; None divides it only once."""

    @model_validator(mode="after")
    def _check_rebalance(self) -> Self:
        if self.rebalance_every is not None and self.shares != MEASURED:
            raise SpecError(
                f"batch.rebalance_every={self.rebalance_every} has no effect without shares='measured'; set "
                "shares='measured', or leave rebalance_every out"
            )
        return self

    def per_rank(self, num_ranks: int, *, among: str | None = None) -> int:
        """Return the largest number of samples that any rank processes in one step.

        Args:
            num_ranks: Number of ranks over which the batch is divided.
            among: Description of these ranks for error messages; None if they are all ranks of the job.

        Raises:
            SpecError: The global batch cannot be divided among `num_ranks` ranks.
        """
        return max(self.samples(num_ranks, among=among))

    def samples(self, num_ranks: int, *, among: str | None = None) -> tuple[int, ...]:
        """Return the number of samples of each rank in one step; equal numbers if speeds are yet to be measured.

        For the arguments, see `per_rank`.

        Example:
            >>> Batch(global_batch=96, shares=(2, 2, 1, 1)).samples(4)
            (32, 32, 16, 16)

        Raises:
            SpecError: The global batch cannot be divided among `num_ranks` ranks.
        """
        if isinstance(self.shares, tuple):
            return samples_by_share(self.global_batch, self.shares, num_ranks)
        share, rest = divmod(self.global_batch, num_ranks)
        if rest or not share:
            below, above = share * num_ranks, (share + 1) * num_ranks
            near = f"{below} or {above}" if below else f"{above}"
            raise SpecError(
                f"batch.global_batch={self.global_batch} is not divisible by "
                f"{among or f'world_size={num_ranks}'}; use {near}"
            )
        return (share,) * num_ranks

    def accumulation_steps(self, num_ranks: int, *, among: str | None = None) -> int:
        """Return the number of gradient-accumulation steps, that is, of micro-batches per rank in one optimizer step.

        With uneven shares, this is the number for the rank with the most samples. For the arguments, see `per_rank`.

        Raises:
            SpecError: The micro-batch does not divide the rank's share.
        """
        samples = self.samples(num_ranks, among=among)
        most, common = max(samples), gcd(*samples)
        micro = self.micro_batch or most
        if self.micro_batch is not None and common % micro:
            told = f"the per-rank batch {most}" if common == most else f"the per-rank batches {samples}"
            raise SpecError(
                f"batch.micro_batch={micro} does not divide {told}; "
                f"use one of {divisors_text(common, near=micro)}"
            )
        return most // micro


def batch_from(value: Any) -> Any:
    """Convert the value of the field `batch`: a global batch size, or the JSON fields of a `Batch`."""
    if isinstance(value, dict):
        return Batch.from_fields(value)
    return Batch.from_fields({"global_batch": value}) if isinstance(value, str | int) else value


class Record(Spec):
    """How much of a run is recorded."""

    spans_first: CountOrZero = 100
    """Number of steps at the start whose compute and communication spans are all recorded."""
    spans_every: Count = 10
    """Steps between two recordings of spans after the first `spans_first` steps. Bytes, loss and times are recorded at
    every step."""
    parameters: bool = False
    """Write all parameters to ``parameters.npz`` after the last step, so that runs can be compared tensor by tensor."""
    memory_first: CountOrZero = 3
    """First step whose memory is broken down by type, counted from the start or from the resumed step. The default is
    the third step: by then the optimizer state exists, and DistributedDataParallel, which rebuilds its buckets in the
    second step, has its final buckets. A shorter run measures its last step. With 0, `memory_every` alone determines
    the measured steps. Only measured steps are slower."""
    memory_every: Count | None = 50
    """Steps between two later measurements of memory by type. None measures only once, at `memory_first`."""
    messages_first: CountOrZero = 3
    """Step whose messages are recorded one by one, with receiver, bytes and times, for `StepPlayer`; counted from the
    start or from the resumed step. A shorter run records its last step; 0 records none."""
    noise_scale: bool = False
    """Measure the gradient noise scale: each rank records the squared norms of its own gradients and of the mean over
    all ranks, before compression and clipping. If gradients are compressed, this also sends a sketch of them."""
    noise_every: Count = 1
    """With `noise_scale`: steps between two measurements. At least 1."""

    layers_every: CountOrZero = 10
    """Steps between two records of per-layer values: trust ratios and norms of LAMB and LARS, and residuals of
    compression with error feedback. The first step is always recorded; 0 records none."""

    @model_validator(mode="after")
    def _check_noise_every(self) -> Self:
        if self.noise_every != 1 and not self.noise_scale:
            raise SpecError(
                f"record.noise_every={self.noise_every} has no effect without noise_scale=True; set noise_scale=True, "
                "or leave noise_every out"
            )
        return self

    def watches_layers(self, step: int, first_step: int) -> bool:
        """Return whether per-layer values are recorded at `step`, in a run that begins with `first_step`."""
        return self.layers_every > 0 and (step == first_step or step % self.layers_every == 0)

    def measures_noise(self, step: int) -> bool:
        """Return whether the gradient noise scale is measured at `step`."""
        return self.noise_scale and step % self.noise_every == 0

    def measures_memory(self, step: int, first_step: int, steps: int) -> bool:
        """Return whether memory is broken down by type at `step`, in a run from step `first_step` to step `steps`."""
        first = min(first_step + self.memory_first - 1, steps)
        if step <= first:
            return step == first
        return self.memory_every is not None and step % self.memory_every == 0

    def logged_step(self, first_step: int, steps: int) -> int:
        """Return the step whose messages are recorded, in a run from step `first_step` to step `steps`; 0 for none."""
        return min(first_step + self.messages_first - 1, steps) if self.messages_first else 0

    def shows(self, step: int) -> bool:
        """Return whether spans are recorded at `step`."""
        return step <= self.spans_first or step % self.spans_every == 0


class UserCode(Spec):
    """A callable; only its name is written to JSON.

    The code itself is saved by cloudpickle in a private file of the run directory. A `job.json` that you receive from
    someone else only names the function, and contains no code to run.
    """

    name: str
    """The callable's own name, for messages and plots."""
    _function: Callable[..., Any] | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Self:
        """Wrap a callable under the given name, or under its own name."""
        code = cls(name=name or getattr(function, "__name__", type(function).__name__))
        code._function = function
        return code

    @classmethod
    def _in_annotation(cls) -> str:
        return "Callable"

    @property
    def is_here(self) -> bool:
        """Whether the callable itself is loaded, rather than only its name."""
        return self._function is not None

    @property
    def function(self) -> Callable[..., Any]:
        """The callable.

        Raises:
            SpecError: The job was read from JSON, which contains only the name.
        """
        if self._function is None:
            raise SpecError(
                f"the code of {self.name!r} is not part of this job.json; give the function again with "
                "job.replace(...), or load the job from its run with ss.load_job(run, trust_code=True)"
            )
        return self._function


def _wrap(value: Any) -> Any:
    if callable(value) and not isinstance(value, UserCode):
        return UserCode.of(value)
    return value


Named = Annotated[str | UserCode, BeforeValidator(_wrap)]
"""A name from a catalogue, or a user-defined callable."""


def _wrap_data(value: Any) -> Any:
    """Choose the type described by JSON fields; if pydantic tried both types, errors would name the wrong fields."""
    if isinstance(value, dict):
        return (Shards if "path" in value else UserCode).from_fields(value)
    return _wrap(value)


Data = Annotated[str | UserCode | Shards, BeforeValidator(_wrap_data)]
"""Data by name or path, a user-defined callable, or shards with settings."""


def label_of(value: str | UserCode | Shards) -> str:
    """Return the display name of a catalogue name, a callable, or shards."""
    return value if isinstance(value, str) else value.name


JobPrecision = Literal["fp32", "fp64", "bf16-mixed", "fp16-mixed"]
PRECISIONS: tuple[str, ...] = get_args(JobPrecision)
ALIASES: Mapping[str, str] = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""Full name of each precision that has a short name."""


def full_name(precision: Any) -> Any:
    """Return the full name of a precision given by its alias; return any other value unchanged.

    Example:
        >>> full_name("bf16"), full_name("fp32")
        ('bf16-mixed', 'fp32')
    """
    return ALIASES.get(precision, precision) if isinstance(precision, str) else precision
