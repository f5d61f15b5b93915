"""Report of a check: the losses of each step, the relative difference of each tensor, and a verdict as text.

"Sharded" here means distributed over several ranks, even if each rank has a whole replica of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardscope import show
from shardscope.show import Sentences, Table
from shardscope.spec import Job
from shardscope.spec.job_parts import label_of
from shardscope.spec.units import plural

if TYPE_CHECKING:
    import pandas as pd

BOUNDS = {"fp64": 1e-9, "fp32": 1e-5, "bf16-mixed": 2e-2, "fp16-mixed": 2e-2}
"""Largest relative difference that is attributed to rounding, by the job's precision."""
_CUT_FACTOR, _MOST_CUT = 10, 2e-2
"""Allowed difference with the whole batch at once: a multiple of the bound, because kernels for other shapes
sum in another order; and its upper limit.
"""
_ROWS_SHOWN = 8
_NOISE = (
    "A tensor whose gradient is only rounding noise, such as the bias of attention keys, can differ by more."
)


class TensorDifference(NamedTuple):
    """Difference of one parameter between the two runs.

    `relative_difference` is |sharded - single| / |single| in the Euclidean norm. `share` is the fraction, 0 to 1, that
    the parameter contributes to the squared difference of all parameters as one vector.
    """

    tensor: str
    shape: tuple[int, ...]
    relative_difference: float
    share: float


class LossPair(NamedTuple):
    """Mean loss of one step in both runs, and `relative_difference`, which is |sharded - single| / |single|."""

    step: int
    sharded: float
    single: float
    relative_difference: float


@dataclass(frozen=True)
class CheckReport:
    """Comparison of a sharded job with the same job on one process.

    Attributes:
        strategy: The strategy's label.
        world_size: Number of ranks of the sharded run.
        model: Name of the model.
        precision: Precision of both runs, such as ``"fp32"``.
        steps: Number of optimizer steps of each run.
        bound: Largest relative difference of a loss, and of all parameters as one vector, that counts as equal.
        because: Why the strategy or compression changes the result by design; None if both runs must be equal.
        difference: Relative difference of all parameters as one vector.
        tensors: All parameters, the one with the largest relative difference first.
        losses: Losses of all steps.
        only_in_one: Names of the parameters that exist in only one of the runs, or that differ in shape.
        runs: Ids of the runs: sharded, on one process with the micro-batches of a rank, and, unless that is the same,
            on one process with the whole batch in one micro-batch.
        skipped: Number of steps in which the sharded run updated nothing because its gradients overflowed in fp16.
        cut_difference: Largest relative difference of a loss, and of all parameters as one vector, between the runs on
            one process with micro-batches and with the whole batch at once; None if that was not compared.
        not_uncut_because: Why no run with the whole batch in one micro-batch was compared; None if there was
            one, or if a rank's micro-batch already is the whole batch.
        mixes_samples: Kinds of layers, such as BatchNorm2d, whose outputs depend on the other rows of the micro-batch.
        loss_note: Note of the runs about a loss that is not a mean over rows; None if there is none.
    """

    strategy: str
    world_size: int
    model: str
    precision: str
    steps: int
    bound: float
    because: str | None
    difference: float
    tensors: tuple[TensorDifference, ...] = field(repr=False)
    losses: tuple[LossPair, ...] = field(repr=False)
    only_in_one: tuple[str, ...]
    runs: tuple[str, ...]
    skipped: int = 0
    cut_difference: float | None = None
    not_uncut_because: str | None = None
    mixes_samples: tuple[str, ...] = ()
    loss_note: str | None = None

    @property
    def was_tried(self) -> bool:
        """Whether any step updated the parameters."""
        return self.skipped < self.steps

    @property
    def passed(self) -> bool | None:
        """Whether the sharded run agrees with the run on one process; None if the check cannot decide.

        The check cannot decide if the strategy or compression changes the result by design, or if every step was
        skipped. It fails if the result on one process depends on how the batch is split into micro-batches, unless that
        is due to layers that mix samples, such as batch norm.
        """
        if self.depends_on_cut:
            return False
        if self.because is not None or not self.was_tried:
            return None
        return self._is_equal

    @property
    def _is_equal(self) -> bool:
        return not self.only_in_one and self.difference <= self.bound and self.loss_difference <= self.bound

    @property
    def depends_on_cut(self) -> bool:
        """Whether training on one process differs between the whole batch at once and its micro-batches.

        False if the cause may be layers that mix samples, or sources of differences between ranks such as dropout,
        unless the runs themselves report that the loss is the cause.
        """
        is_apart = (self.cut_difference or 0.0) > min(_CUT_FACTOR * self.bound, _MOST_CUT)
        return is_apart and (self.loss_note is not None or (self._is_equal and not self.mixes_samples))

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of a loss over all steps; infinite if a step has a loss in only one run."""
        return _largest(pair.relative_difference for pair in self.losses)

    @property
    def verdict(self) -> str:
        """The result of the check, in a few sentences."""
        return " ".join(filter(None, (self._on_ranks, self._on_cut)))

    @property
    def _on_cut(self) -> str:
        """Result of the comparison with the whole batch in one micro-batch; empty if both agree."""
        if self.not_uncut_because is not None:
            return f"The whole batch in one micro-batch was not compared: {self.not_uncut_because}."
        apart = f"the whole batch in one micro-batch differs by {_part(self.cut_difference or 0.0)}"
        if self.depends_on_cut:
            why = self.loss_note or _CUT_FAULT
            return f"But the result depends on how the batch is split: on one process, {apart}; {why}."
        if self.mixes_samples and (self.cut_difference or 0.0) > self.bound:
            layers = " and ".join(self.mixes_samples)
            return f"On one process, {apart}, because {layers} layers mix the samples of a micro-batch."
        return ""

    @property
    def _on_ranks(self) -> str:
        who = f"{self.strategy} on {plural(self.world_size, 'rank')}"
        apart = f"all parameters together differ by {_part(self.difference)}"
        losses = f"the losses by at most {_part(self.loss_difference)}"
        if self.because is not None:
            return (
                f"{who} is not equal to one process by design: {self.because}. "
                f"After {self.steps} steps {apart}, {losses}."
            )
        if not self.was_tried:
            return (
                f"{who} was not tested: the gradients of all {self.steps} steps overflowed in {self.precision}, so "
                "nothing was updated; check more steps (the loss scale halves after each overflow), or use "
                "precision='bf16-mixed'."
            )
        bound = f"{self.bound:.0e} for {self.precision}"
        if self._is_equal:
            noise = f" {_NOISE}" if self.tensors and self.tensors[0].relative_difference > self.bound else ""
            return f"{who} agrees with one process: after {self.steps} steps {apart}, {losses} (bound {bound}).{noise}"
        return f"{who} does not agree with one process (bound {bound}): {self._fault(f'{apart}, {losses}')}."

    def _fault(self, apart: str) -> str:
        if self.only_in_one:
            return f"only one of the runs has {', '.join(self.only_in_one)}, or the shapes differ"
        first = next((pair.step for pair in self.losses if not pair.relative_difference <= self.bound), None)
        when = "" if first is None else f"; the first loss to differ is from step {first}"
        worst = self.tensors[0]
        return (
            f"after {self.steps} steps {apart}, most of all {worst.tensor} by {worst.relative_difference:.1e}{when}; "
            "look for code that depends on the rank or draws random numbers, such as dropout"
        )

    @property
    def table(self) -> pd.DataFrame:
        """Data frame with one row per parameter, sorted by descending relative difference.

        Columns: tensor (name), shape, relative_difference, share (see `TensorDifference`).
        """
        import pandas as pd

        return pd.DataFrame(self.tensors, columns=list(TensorDifference._fields))

    def to_json(self) -> str:
        """Return all fields, with `passed` and `verdict`, as indented JSON; non-finite numbers become strings."""
        names = [name for name in self.__dataclass_fields__ if name not in {"tensors", "losses"}]
        plain: dict[str, Any] = {"passed": self.passed, "verdict": self.verdict}
        plain |= {name: _plain(getattr(self, name)) for name in names}
        plain["tensors"] = [{k: _plain(v) for k, v in row._asdict().items()} for row in self.tensors]
        plain["losses"] = [{k: _plain(v) for k, v in pair._asdict().items()} for pair in self.losses]
        return json.dumps(plain, indent=2)

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        """Return the verdict, with a pass or fail mark, and the tensors that differ most, as HTML."""
        mark, colour = _MARKS[self.passed] if self.was_tried or self.because else _NOT_TRIED
        shown = show.html([Sentences([f"{mark}.", self.verdict]), worst_of(self, "; all are in .table")])
        return f"<div style='border-left:6px solid {colour};padding-left:7px'>{shown}</div>"


_CUT_FAULT = (
    "the loss is not the mean over its rows, or a layer mixes samples; if the loss counts fewer targets in some rows, "
    "set its attribute count to a function that returns their number, or reduction='sum' if it is a sum"
)
_MARKS = {
    True: ("✓ equal", "#0f8a6d"),
    False: ("✗ not equal", "#c5372c"),
    None: ("≠ by design", "#8a6d00"),
}
_NOT_TRIED = ("○ not tried", "#8a6d00")


def _part(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def worst_of(report: CheckReport, rest: str) -> Table:
    """Return a table of the parameters that differ most; `rest` ends the line with the number of omitted parameters."""
    rows = [
        (row.tensor, "x".join(map(str, row.shape)), f"{row.relative_difference:.1e}", f"{row.share:.0%}")
        for row in report.tensors[:_ROWS_SHOWN]
    ]
    left = len(report.tensors) - len(rows)
    more = f"and {left} more, none with a larger difference{rest}" if left else ""
    return Table(("parameter", "shape", "relative difference", "share"), rows, more=more)


def compare(
    job: Job,
    runs: tuple[str, ...],
    losses: tuple[Mapping[int, float], Mapping[int, float]],
    values: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
    skipped: int = 0,
    **others: Any,
) -> CheckReport:
    """Return the report that compares two runs of `job`; in each pair, the sharded run comes first.

    Args:
        job: The sharded job.
        runs: Ids of the two runs.
        losses: For each run, the loss by step.
        values: For each run, the parameters by name after the last step.
        skipped: Number of steps that the sharded run skipped.
        others: Further fields of the report, about the whole batch in one micro-batch.
    """
    ours, theirs = values
    both = [name for name in theirs if name in ours and ours[name].shape == theirs[name].shape]
    apart = {name: _norm(_difference(ours[name], theirs[name])) for name in both}
    whole, size = _norm(list(apart.values())), _norm([_norm(theirs[name]) for name in both])
    tensors = [
        TensorDifference(
            name, theirs[name].shape, _relative(apart[name], _norm(theirs[name])), _share(apart[name], whole)
        )
        for name in both
    ]
    return CheckReport(
        strategy=job.strategy.label, world_size=job.world_size, model=label_of(job.model),
        precision=job.precision, steps=job.steps, bound=BOUNDS[job.precision], because=_because(job),
        difference=_relative(whole, size),
        tensors=tuple(sorted(tensors, key=lambda row: _rank(row.relative_difference), reverse=True)),
        losses=tuple(_pair(step, *losses) for step in sorted({*losses[0], *losses[1]})),
        only_in_one=tuple(sorted({*ours, *theirs} - {*both})), runs=runs, skipped=skipped, **others,
    )  # fmt: skip


def cut_difference(
    losses: tuple[Mapping[int, float], Mapping[int, float]],
    values: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
) -> float:
    """Return the largest relative difference of a loss, and of all parameters as one vector, between two runs."""
    ours, theirs = values
    whole = _norm([_norm(_difference(ours[name], theirs[name])) for name in theirs])
    size = _norm([_norm(value) for value in theirs.values()])
    pairs = (_pair(step, *losses) for step in {*losses[0], *losses[1]})
    return max(_rank(_relative(whole, size)), _largest(pair.relative_difference for pair in pairs))


def _because(job: Job) -> str | None:
    """Return why the strategy, the compression or both change the result by design; None if neither does."""
    reasons = [reason for reason in (job.strategy.differs_because, job.compression.differs_because) if reason]
    return ", and ".join(reasons) or None


def _pair(step: int, ours: Mapping[int, float], theirs: Mapping[int, float]) -> LossPair:
    sharded, single = ours.get(step, math.nan), theirs.get(step, math.nan)
    return LossPair(step, sharded, single, _relative(abs(sharded - single), abs(single)))


def _difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return ours.astype(np.float64) - theirs.astype(np.float64)


def _norm(values: np.ndarray | Sequence[float]) -> float:
    return float(np.linalg.norm(np.asarray(values, dtype=np.float64).ravel()))


def _relative(difference: float, size: float) -> float:
    """Return `difference / size`; 0 if `difference` is 0, infinite if `difference` is not finite or `size` is 0."""
    if difference == 0:
        return 0.0
    return difference / size if math.isfinite(difference) and size > 0 else math.inf


def _share(difference: float, whole: float) -> float:
    return (difference / whole) ** 2 if whole else 0.0


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _largest(values: Any) -> float:
    return max(map(_rank, values), default=math.inf)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
