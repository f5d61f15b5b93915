"""Priors of a study: a default space for the job, settings worth trying first, and equal budgets for optimizers.

Seeds are settings that run before the sampler draws any:

1. the unchanged job,
2. the baseline optimizers at their usual learning rates, even if the sampler does not draw these optimizers,
3. compressors that may pay off, from the mildest to the strongest, so that the Pareto front is explored from both
   ends,
4. LAMB with learning rate and warm-up scaled with the batch size (You et al. 2020, section 4: the rate grows with the
   square root of the batch size, the warm-up fraction in proportion to it). The smallest batch, which takes the most
   steps, comes last: by then a pruner has finished trials to compare it with.

All results are measured; predictions are never reported to the study as results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.analytic.communication.exchange import exchange_of, exchange_time
from shardscope.analytic.large_batch import scaled_lr
from shardscope.errors import SpecError
from shardscope.spec import Compression, Job, Optimizer, registry
from shardscope.spec.models import model_config
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space, Value, parse_name
from shardscope.tuning.apply import apply, fault_of
from shardscope.tuning.batch_range import around
from shardscope.tuning.records import DRAWN, IMPOSSIBLE, not_counted, study_name

_MOMENTUM = "nesterov"
BASELINES = ("adamw", _MOMENTUM)
"""Baseline optimizers. A study that searches optimizers runs a trial with each, because layer-wise methods must be
compared with them (Nado et al. 2021, "A large batch optimizer reality check")."""
COMPRESSORS = ("none", "bf16", "int8", "int4", "topk", "powersgd")
_STRENGTHS: Mapping[str, Any] = {
    "compression[topk].ratio": (0.003, 0.1, "log"), "compression[powersgd].rank": (1, 16, "log"),
}  # fmt: skip
_LONGEST_WARMUP = 0.3
_WORTH_A_TRIAL = 0.5
"""Cost of a compressor's exchange, relative to the uncompressed exchange, up to which the compressor becomes a seed."""
_LEVELS = 3
"""Number of compressors among the seeds; they are spread evenly over those that pay off, ordered by cost."""


class Seed(NamedTuple):
    """Settings to run before the sampler draws any."""

    params: Mapping[str, Value]
    origin: str
    """Reason why the seed is tried: ``default``, ``baseline`` or ``prior``."""


def default_space(job: Job) -> Space:
    """Return the default space: optimizer, learning rate, batch size, warm-up and the compressors that can be used.

    It always contains the job's own learning rate and methods.
    """
    optimizers = list(dict.fromkeys([job.optimizer.name, *BASELINES, "lamb", "lars"]))
    parameters: dict[str, Any] = {
        "optimizer": optimizers,
        **_rates(optimizers),
        **_own_rate(job),
        "warmup": (0.0, _LONGEST_WARMUP),
    }
    batch = around(job)
    if batch is not None:
        parameters["batch"] = batch
    methods = [n for n in dict.fromkeys([*COMPRESSORS, job.compression.name]) if _is_usable(job, n)]
    if job.world_size > 1 and len(methods) > 1:
        parameters["compression"] = methods
        parameters |= {n: strength for n, strength in _STRENGTHS.items() if parse_name(n).branch in methods}
    return Space(parameters=parameters)


def with_baselines(space: Space) -> Space:
    """Return the space with the baselines added to its optimizers; unchanged if it has no choice of optimizers.

    The sampler draws only the optimizers of `space`, see `Definition.drawn`.
    """
    chosen = space.parameters.get("optimizer")
    if not isinstance(chosen, Choices):
        return space
    missing = [name for name in BASELINES if name not in chosen.values]
    if not missing:
        return space
    rates = {} if "optimizer.lr" in space.parameters else _rates(missing)
    return Space(
        parameters={**space.parameters, "optimizer": Choices(values=(*chosen.values, *missing)), **rates}
    )


def optimizers_of(space: Space) -> tuple[str, ...] | None:
    """Return the optimizers that a space chooses from; None if it has no choice of optimizers."""
    chosen = space.parameters.get("optimizer")
    return tuple(map(str, chosen.values)) if isinstance(chosen, Choices) else None


def _range(optimizer: str) -> tuple[float, float]:
    return registry.require_known(Optimizer, optimizer).rates()


def _rates(optimizers: list[str]) -> dict[str, Any]:
    return {f"optimizer[{name}].lr": (*_range(name), "log") for name in optimizers}


def _own_rate(job: Job) -> dict[str, Any]:
    """Return the learning-rate range of the job's own optimizer, widened to contain the job's learning rate."""
    name, rate = job.optimizer.name, job.optimizer.lr
    low, high = _range(name)
    return {f"optimizer[{name}].lr": (min(low, rate), max(high, rate), "log")}


def _is_usable(job: Job, method: str) -> bool:
    try:
        job.replace(compression=Compression(name=method))
    except SpecError:
        return False
    return True


def seeds(
    job: Job, space: Space, objectives: Sequence[str] = (), *, drawn: Sequence[str] | None = None
) -> list[Seed]:
    """Return the seeds of a study, without duplicates; a trial samples the settings that its seed does not fix.

    Args:
        job: The study's job.
        space: The study's search space.
        objectives: Objectives of the study. If they include ``bytes``, compressors can pay off even if the job does
            not describe its link.
        drawn: The optimizers that the sampler draws; None for all optimizers of the space. With any other optimizer,
            the only seeds are the unchanged job and the baselines at their usual rates, with the origin ``baseline``.
    """
    paying = _paying(job, space, objectives)
    drawn = (drawn if drawn is not None else optimizers_of(space)) or ()
    found: list[Seed] = []
    for seed in (
        *_own(job, space),
        *_baselines(job, space),
        *_compressors(job, space, paying, drawn),
        *_lamb_line(job, space, paying),
    ):
        inside = {name: value for name, value in seed.params.items() if _contains(space, name, value)}
        if drawn and "optimizer" not in inside:  # else any optimizer of the space could be drawn for it
            inside["optimizer"] = drawn[0]
        known = any(dict(other.params) == inside for other in found)
        lost = {name for name in seed.params if name in space.parameters} - set(inside)
        if inside and not known and fault_of(job, inside) is None:
            is_other = bool(drawn) and inside["optimizer"] not in drawn
            # a seed that lost settings outside the space is not the job itself
            found.append(Seed(inside, "baseline" if is_other else "prior" if lost else seed.origin))
    return found


def _contains(space: Space, name: str, value: Value) -> bool:
    parameter = space.parameters.get(name)
    if parameter is None or (not isinstance(parameter, Choices) and not isinstance(value, int | float)):
        return False
    if isinstance(parameter, Choices):
        return value in parameter.values
    if isinstance(parameter, PowersOfTwo) and int(value) & (int(value) - 1):  # type: ignore[arg-type]
        return False
    return bool(parameter.low <= value <= parameter.high)  # type: ignore[operator]


def _rate_name(space: Space, optimizer: str) -> str:
    own = f"optimizer[{optimizer}].lr"
    return own if own in space.parameters else "optimizer.lr"


def _own(job: Job, space: Space) -> Iterator[Seed]:
    """Yield a seed with the job's own settings; `seeds` drops the settings outside the space."""
    share = job.lr_schedule.warmup_steps / job.steps
    name = job.optimizer.name
    yield Seed(
        {
            "optimizer": name, _rate_name(space, name): job.optimizer.lr, "batch": job.batch.global_batch,
            "warmup": share, "compression": job.compression.name, "strategy": job.strategy.label,
            "lr_rule": "none",
        },
        "default",
    )  # fmt: skip


def _usual(optimizer: str) -> float:
    low, high = _range(optimizer)
    return float(f"{math.sqrt(low * high):.3g}")


def _baselines(job: Job, space: Space) -> Iterator[Seed]:
    for name in BASELINES if isinstance(space.parameters.get("optimizer"), Choices) else ():
        yield Seed(
            {
                "optimizer": name, _rate_name(space, name): _usual(name), "batch": job.batch.global_batch,
                "warmup": 0.1, "compression": "none",
            },
            "baseline",
        )  # fmt: skip


def _lamb_line(job: Job, space: Space, paying: Sequence[Mapping[str, Value]]) -> Iterator[Seed]:
    """Yield LAMB seeds with the largest, the middle and the smallest batch size.

    All except the last seed use the strongest compressor that pays off and has no searched strength (a quantizer).
    Quantizers barely change the final quality, so one trial shows the effects of both the batch size and the saved
    bytes.
    """
    batches = space.parameters.get("batch")
    if not isinstance(batches, PowersOfTwo) or optimizers_of(space) is None:
        return
    low, high = batches.exponents
    base = job.batch.global_batch
    dense = [method for method in paying if len(method) == 1]
    for exponent in sorted({low, (low + high) // 2, high}, reverse=True):
        batch = 2**exponent
        rate = scaled_lr(batch, lr=_usual("lamb"), base_batch=base, rule="sqrt")
        yield Seed(
            {
                "optimizer": "lamb", "batch": batch, _rate_name(space, "lamb"): float(rate),
                "warmup": min(_LONGEST_WARMUP, 0.1 * batch / base),
                **(dense[-1] if dense and exponent > low else {"compression": "none"}),
            },
            "prior",
        )  # fmt: skip


def _compressors(
    job: Job, space: Space, paying: Sequence[Mapping[str, Value]], drawn: Sequence[str]
) -> Iterator[Seed]:
    """Yield seeds for the mildest, a medium and the strongest compressor among those that pay off.

    Their other settings are fixed at usual values, because a trial whose sampled learning rate fails shows nothing
    about the compressor. The optimizer alternates between Nesterov momentum, for which error feedback is proven to
    converge (Zheng, Huang and Kwok, NeurIPS 2019), and the job's optimizer, as far as the sampler draws these.
    """
    own = job.optimizer.name
    names = [name for name in (_MOMENTUM, own) if name in drawn] or [drawn[0] if drawn else own]
    for index, method in enumerate(_spread(paying, _LEVELS)):
        name = names[index % len(names)]
        usual: dict[str, Value] = {
            "optimizer": name, _rate_name(space, name): _usual(name), "batch": job.batch.global_batch, "warmup": 0.1,
        }  # fmt: skip
        yield Seed({**usual, **method}, "prior")


def _spread(paying: Sequence[Mapping[str, Value]], count: int) -> list[Mapping[str, Value]]:
    """Return `count` of the methods, evenly spaced from the first to the last; all methods if there are fewer."""
    if len(paying) <= count:
        return list(paying)
    return [paying[round(index * (len(paying) - 1) / (count - 1))] for index in range(count)]


def _paying(job: Job, space: Space, objectives: Sequence[str]) -> list[Mapping[str, Value]]:
    """Return the settings of the compressors that pay off, most expensive first.

    Each method is tried at the lowest, middle and highest strength (ratio or rank) in the space. Its cost is the time
    for its bytes and messages on the job's link; without a link it is the number of bytes, if ``bytes`` is an
    objective. The time to encode and decode is not included. Settings that cost more than half of the uncompressed
    exchange are left out.
    """
    chosen = space.parameters.get("compression")
    by_bytes = job.link is None and "bytes" in objectives
    if not isinstance(chosen, Choices) or not isinstance(job.model, str) or not (job.link or by_bytes):
        return []
    side = math.isqrt(model_config(job.model).num_params)
    buckets = [[(side, side)]]  # all parameters as one matrix; accurate enough for a threshold of one half

    def cost(compression: Compression) -> float:
        whole = compression.period > 1  # local SGD: an uncompressed exchange every `period` steps
        exchange = exchange_of(Compression("none") if whole else compression, buckets, job.world_size)
        if job.link is None:
            return exchange.sent_bytes / compression.period
        seconds = exchange_time(exchange, job.link.bandwidth, job.link.latency_s)
        return float(seconds) / compression.period

    plain, found = cost(Compression("none")), []
    for method in map(str, chosen.values):
        if method == "none" or not _is_usable(job, method):
            continue
        for strength in _strengths(space, method):
            params = {"compression": method, **strength}
            seconds = cost(apply(job.replace(compression=Compression("none")), params).compression)
            if seconds <= _WORTH_A_TRIAL * plain:
                found.append((seconds, params))
    return [params for _, params in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _strengths(space: Space, method: str) -> list[dict[str, Value]]:
    """Return settings for the lowest, middle and highest strength of a method with exactly one searched range.

    For any other method, return one empty dictionary of settings.
    """
    ranges = {
        name: parameter
        for name, parameter in space.parameters.items()
        if parse_name(name).owner == "compression" and parse_name(name).branch == method
    }
    if len(ranges) != 1:
        return [{}]
    ((name, parameter),) = ranges.items()
    if not isinstance(parameter, Between):
        return [{}]
    low, high = parameter.low, parameter.high
    middle = math.sqrt(low * high) if parameter.log else (low + high) / 2
    return [{name: value} for value in (low, round(middle) if parameter.is_whole else middle, high)]


class EqualBudgets:
    """Hook of the driver that gives every drawn optimizer the same number of trials, and other optimizers none.

    Args:
        space: Search space of the study.
        drawn: The optimizers that the sampler draws; None for all optimizers of the space.
    """

    def __init__(self, space: Space, drawn: Sequence[str] | None = None) -> None:
        known = optimizers_of(space) or ()
        self._names = known if drawn is None else tuple(drawn)
        self._is_needed = len(self._names) > 1 or len(known) > len(self._names)
        self._held = study_name("optimizer", space) if known else ""

    def before_asking(self, study: optuna.Study, trials: list[FrozenTrial]) -> None:
        """Fix the next trial's optimizer to that with the fewest trials, unless a trial is waiting in the queue."""
        if not self._is_needed or any(trial.state == TrialState.WAITING for trial in trials):
            return
        counted = [trial for trial in trials if not_counted(trial) in (None, IMPOSSIBLE)]
        had = {name: sum(t.params.get(self._held) == name for t in counted) for name in self._names}
        study.enqueue_trial(
            {self._held: min(self._names, key=lambda name: had[name])}, user_attrs={DRAWN: True}
        )
