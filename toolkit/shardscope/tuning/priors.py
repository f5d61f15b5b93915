"""What a study knows before its first trial: a space that suits the job, settings worth trying first, fair shares.

Seeds are settings that are run before any is drawn: the job as it is, the baselines at usual rates, LAMB's line of
rate and warm-up over the batch (You et al. 2020, section 4: the rate grows with the root of the batch, the share of
warm-up in proportion to it), and compressors that could pay on the job's link. Whatever they come to is measured;
predictions are never told to the study as results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.analytic.communication.worth import exchange_of, exchange_time
from shardscope.analytic.large_batch import scaled_lr
from shardscope.errors import SpecError
from shardscope.spec import Compression, Job
from shardscope.spec.models import model_config
from shardscope.spec.space import Choices, PowersOfTwo, Space, Value, parse_name
from shardscope.tuning.apply import apply
from shardscope.tuning.records import IMPOSSIBLE, ORIGIN, not_counted, study_name, to_study

RATES: Mapping[str, tuple[float, float]] = {
    "sgd": (1e-2, 1.0), "nesterov": (3e-3, 0.3), "adamw": (3e-4, 3e-2), "lamb": (1e-3, 1e-1), "lars": (0.3, 30.0),
}  # fmt: skip
"""Learning rates to search where nobody says: a decade either side of what is usual for batches of 32 to 512."""
BASELINES = ("adamw", "nesterov")
"""In every study that chooses optimizers: tuned at equal budget they are what layer-wise methods must be held against
(Nado et al. 2021, "A large batch optimizer reality check")."""
COMPRESSORS = ("none", "bf16", "int8", "int4", "topk", "powersgd")
_STRENGTHS: Mapping[str, Any] = {
    "compression[topk].ratio": (0.003, 0.1, "log"), "compression[powersgd].rank": (1, 16, "log"),
}  # fmt: skip
_BATCH_FACTOR = 4
_LONGEST_WARMUP = 0.3
_WORTH_A_TRIAL = 0.5
"""A compressor is tried first if its bytes alone take at most this share of the uncompressed exchange on the link."""


class Seed(NamedTuple):
    """Settings to run before any is drawn."""

    params: Mapping[str, Value]
    origin: str


def default_space(job: Job) -> Space:
    """Optimizer and rate, batch, warm-up, and compression as far as the job's strategy carries it.

    The job's own rate and method are in it, whatever they are.
    """
    optimizers = list(dict.fromkeys([job.optimizer.name, *BASELINES, "lamb", "lars"]))
    parameters: dict[str, Any] = {
        "optimizer": optimizers,
        **_rates(optimizers),
        **_own_rate(job),
        "warmup": (0.0, _LONGEST_WARMUP),
    }
    batch = _batches(job)
    if batch is not None:
        parameters["batch"] = batch
    methods = [n for n in dict.fromkeys([*COMPRESSORS, job.compression.name]) if _goes(job, n)]
    if job.world_size > 1 and len(methods) > 1:
        parameters["compression"] = methods
        parameters |= {n: strength for n, strength in _STRENGTHS.items() if parse_name(n).branch in methods}
    return Space(parameters=parameters)


def with_baselines(space: Space) -> Space:
    """The space with the baselines among the optimizers, if it chooses optimizers at all."""
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


def _rates(optimizers: list[str]) -> dict[str, Any]:
    return {f"optimizer[{name}].lr": (*RATES[name], "log") for name in optimizers}


def _own_rate(job: Job) -> dict[str, Any]:
    """The range of the job's own optimizer, widened to its own rate."""
    name, rate = job.optimizer.name, job.optimizer.learning_rate
    low, high = RATES[name]
    return {f"optimizer[{name}].lr": (min(low, rate), max(high, rate), "log")}


def _batches(job: Job) -> PowersOfTwo | None:
    """Powers of two around the job's batch that its ranks can share; None where there are no two of them."""
    own = job.batch.global_size
    ends = [own / _BATCH_FACTOR, own * _BATCH_FACTOR]
    exponents = range(max(0, math.ceil(math.log2(ends[0]))), math.floor(math.log2(ends[1])) + 1)
    possible = [2**e for e in exponents if _possible(job, {"batch": 2**e}) and _leaves_steps(job, 2**e)]
    return PowersOfTwo(low=possible[0], high=possible[-1]) if len(possible) > 1 else None


def _leaves_steps(job: Job, batch: int, fewest: int = 8) -> bool:
    return job.steps * job.batch.global_size / batch >= fewest


def _goes(job: Job, method: str) -> bool:
    try:
        job.replace(compression=Compression(name=method))
    except SpecError:
        return False
    return True


def _possible(job: Job, params: Mapping[str, Value]) -> bool:
    try:
        apply(job, params)
    except SpecError:
        return False
    return True


def seeds(job: Job, space: Space) -> list[Seed]:
    """Settings worth trying first, none twice; what a seed leaves open is drawn."""
    found: list[Seed] = []
    for seed in (
        *_own(job, space),
        *_baselines(job, space),
        *_lamb_line(job, space),
        *_compressors(job, space),
    ):
        inside = {name: value for name, value in seed.params.items() if _contains(space, name, value)}
        known = any(dict(other.params) == inside for other in found)
        lost = {name for name in seed.params if name in space.parameters} - set(inside)
        if inside and not known and _possible(job, inside):
            found.append(
                Seed(inside, "prior" if lost else seed.origin)
            )  # what is drawn in part is no default
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
    """The job as it is, as far as the space holds it."""
    share = job.schedule.warmup_steps / job.steps
    name = job.optimizer.name
    yield Seed(
        {
            "optimizer": name, _rate_name(space, name): job.optimizer.learning_rate, "batch": job.batch.global_size,
            "warmup": share, "compression": job.compression.name, "strategy": job.strategy.label,
            "lr_rule": "none",
        },
        "default",
    )  # fmt: skip


def _usual(optimizer: str) -> float:
    low, high = RATES[optimizer]
    return math.sqrt(low * high)


def _baselines(job: Job, space: Space) -> Iterator[Seed]:
    for name in BASELINES if isinstance(space.parameters.get("optimizer"), Choices) else ():
        yield Seed(
            {
                "optimizer": name, _rate_name(space, name): _usual(name), "batch": job.batch.global_size,
                "warmup": 0.1, "compression": "none",
            },
            "baseline",
        )  # fmt: skip


def _lamb_line(job: Job, space: Space) -> Iterator[Seed]:
    """At the smallest, the middle and the largest batch."""
    batches = space.parameters.get("batch")
    if not isinstance(batches, PowersOfTwo) or not isinstance(space.parameters.get("optimizer"), Choices):
        return
    low, high = batches.exponents
    base = job.batch.global_size
    for exponent in sorted({low, (low + high) // 2, high}):
        batch = 2**exponent
        yield Seed(
            {
                "optimizer": "lamb", "batch": batch, "compression": "none",
                _rate_name(space, "lamb"): float(
                    scaled_lr(batch, lr=_usual("lamb"), base_batch=base, rule="sqrt")
                ),
                "warmup": min(_LONGEST_WARMUP, 0.1 * batch / base),
            },
            "prior",
        )  # fmt: skip


def _compressors(job: Job, space: Space) -> Iterator[Seed]:
    """Those whose bytes could pay on the job's link, all else as usual; what packing takes is left to measurement.

    All else, because a method drawn together with a rate that fails says nothing about the method.
    """
    chosen = space.parameters.get("compression")
    if not isinstance(chosen, Choices) or job.link is None or not isinstance(job.model, str):
        return
    side = math.isqrt(model_config(job.model).num_params)
    buckets = [[(side, side)]]  # as one matrix; near enough to tell half from whole
    plain = exchange_time(
        exchange_of(Compression(), buckets, job.world_size), job.link.bandwidth, job.link.latency_s
    )
    name = job.optimizer.name
    usual: dict[str, Value] = {
        "optimizer": name, _rate_name(space, name): _usual(name), "batch": job.batch.global_size, "warmup": 0.1,
    }  # fmt: skip
    for method in map(str, chosen.values):
        if method == "none" or not _goes(job, method):
            continue
        packed = exchange_of(Compression(name=method), buckets, job.world_size)
        seconds = exchange_time(packed, job.link.bandwidth, job.link.latency_s)
        if float(seconds) <= _WORTH_A_TRIAL * float(plain):
            yield Seed({**usual, "compression": method}, "prior")


def enqueue(study: optuna.Study, job: Job, space: Space) -> None:
    """Put the seeds into a new study's queue."""
    for seed in seeds(job, space):
        study.enqueue_trial(
            to_study(seed.params, space), user_attrs={ORIGIN: seed.origin}, skip_if_exists=True
        )


class EqualBudgets:
    """Gives every optimizer of a space as many trials as any other."""

    def __init__(self, space: Space) -> None:
        chosen = space.parameters.get("optimizer")
        self._names = [str(v) for v in chosen.values] if isinstance(chosen, Choices) else []
        self._held = study_name("optimizer", space) if self._names else ""

    def before_asking(self, study: optuna.Study, trials: list[FrozenTrial]) -> None:
        """Fix the next trial's optimizer to the one that has had the fewest, unless one is waiting."""
        if len(self._names) < 2 or any(trial.state == TrialState.WAITING for trial in trials):
            return
        counted = [trial for trial in trials if not_counted(trial) in (None, IMPOSSIBLE)]
        had = {name: sum(t.params.get(self._held) == name for t in counted) for name in self._names}
        study.enqueue_trial({self._held: min(self._names, key=lambda name: had[name])})
