"""Layouts of several axes drawn from a seed, trained on a pool of ranks and held against one process.

A layout is drawn from all that `Layout` accepts for 2, 4 or 8 ranks, so axes that jobs learn to train take part without
a change here. A case ends in one of two ways: ``equal``, where losses and parameters are those of one process, or
``refused``, by a sentence that says what is wrong and what to use instead. Anything else is a violation.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import context_for
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, mean_losses, relative_difference
from shardscope.errors import ShardscopeError
from shardscope.runlog.writer import EventWriter
from shardscope.spec.context_comm import ContextComm
from shardscope.spec.layout import searched_schedules
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer

WORLD_SIZES = (2, 4, 4, 8)
AXES = ("data", "data", "tensor", "tensor", "pipeline", "context")
"""Each factor 2 of the number of ranks goes to one of them."""
DATA = ("ring", "ring:2", "tree", "all-reduce", "hierarchical")
"""Strategies of a data axis without ZeRO."""
BATCH, STEPS = 24, 6
MOST_MICRO_BATCHES = 8
EXPERTS = 4
WITH_EXPERTS = 0.35
"""Share of the cases whose model has experts."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
PAIR_TOLERANCE = 1e-6
PAIRS, GRID = 60, 300

Pools = Callable[[int], RankPool]


def gpt() -> nn.Module:
    """A tiny GPT of six blocks, whose embedding is its head."""
    return build_model(GPTConfig(layers=6, hidden=16, heads=8, vocab=64 * 4, seq=16, ffn=32))


def mixture() -> nn.Module:
    """The same with experts in all blocks but the first, which drop tokens beyond an even load."""
    routed = RoutedMixture(
        experts=EXPERTS, active=2, ffn=8, shared_ffn=8, dense_layers=1, capacity_factor=1.0, balance=0.1
    )
    return build_model(GPTConfig(layers=6, hidden=16, heads=8, vocab=256, seq=16, ffn=32, mixture=routed))


MODELS = {"gpt": gpt, "mixture": mixture}


@contextmanager
def pools() -> Iterator[Pools]:
    """A pool of ranks for each number of ranks, started when it is first needed, and again if a case ends it."""
    started: dict[int, RankPool] = {}

    def of(world_size: int) -> RankPool:
        if world_size not in started or started[world_size].closed:
            started[world_size] = RankPool(world_size, timeout_s=20)
        return started[world_size]

    try:
        yield of
    finally:
        for pool in started.values():
            pool.close()


def draw_layout(
    source: random.Random, world_sizes: Sequence[int] = WORLD_SIZES, model: str = "gpt"
) -> dict[str, Any]:
    """Fields of a job: a layout of few micro-batches, and settings of its axes where the layout leaves them open."""
    degrees = dict.fromkeys(AXES, 1)
    for _ in range(source.choice(world_sizes).bit_length() - 1):
        degrees[source.choice(AXES)] *= 2
    zero = source.choice([0, 1, 2, 3]) if degrees["data"] * degrees["context"] > 1 else 0
    each = BATCH // degrees["data"]
    sizes = [size for size in range(1, each + 1) if each % size == 0 and each // size <= MOST_MICRO_BATCHES]
    fields: dict[str, Any] = {
        **degrees,
        "zero": zero,
        "global_batch": BATCH,
        "micro_batch": source.choice(sizes),
    }
    if zero and degrees["data"] > 2 and source.random() < 0.3:
        fields["shard"] = 2
    if degrees["tensor"] > 1:
        fields["sequence_parallel"] = source.random() < (0.5 if model == "gpt" else 0.1)
    if degrees["pipeline"] > 1:
        fields["schedule"] = source.choice(searched_schedules())
        fields["virtual_stages"] = ss.PipelineSchedule(fields["schedule"]).default_stages
    if source.random() < 0.4:
        fields["recompute"] = source.choice(["selective", "full"])
    given: dict[str, Any] = {"layout": fields}
    if model != "gpt":
        given["model"] = model
        ranks = degrees["data"] * degrees["context"]
        fields["expert"] = source.choice([size for size in (1, 2, EXPERTS) if ranks % size == 0])
    if degrees["context"] > 1:
        given["context_comm"] = source.choice(get_args(ContextComm))
    if not zero and degrees["data"] > 1 and degrees["pipeline"] == 1 and source.random() < 0.5:
        given["strategy"] = source.choice(DATA)
    return given


def job_of(drawn: Mapping[str, Any], **settings: Any) -> ss.Job:
    """The job of drawn fields."""
    layout = ss.Layout(**drawn["layout"])
    rest = {"precision": "fp64", **drawn, **settings, "layout": layout, "model": MODELS[model_of(drawn)]}
    if comm := rest.pop("context_comm", None):
        data = {"data": rest["strategy"]} if "strategy" in rest else {}
        rest["strategy"] = ss.Strategy("mesh", context_comm=comm, **data)
    return ss.Job(data="python-source", **rest)


def model_of(drawn: Mapping[str, Any]) -> str:
    """The name of the model of drawn fields."""
    return str(drawn.get("model", "gpt"))


class Ending(NamedTuple):
    """How a case ended."""

    name: str
    violation: bool = False
    details: Mapping[str, Any] = {}


class Trained(NamedTuple):
    """What a rank trained: losses (None where it computes none), and all parameters; or why it refused to."""

    losses: list[float | None]
    parameters: dict[str, Tensor]
    refusal: str = ""


def train(
    job: ss.Job, steps: range, before: str | None, folder: str, context: RankContext, *, saves: bool = False
) -> Trained:
    """Train some steps on one rank, from a checkpoint if there is one, and save one at the end if asked."""
    here, context = Path(folder), context_for(job, context)
    here.mkdir(exist_ok=True)
    try:
        trainer = Trainer(job, context, here)
    except ShardscopeError as error:
        return Trained([], {}, str(error))
    if before is not None:
        trainer.resume(Path(before))
    losses = [trainer.take_step(step) for step in steps]
    trainer.strategy.synchronize(steps[-1])
    if saves:
        trainer.checkpoints.save(steps[-1])
    parameters = {name: p.detach().double().clone() for name, p in trainer.strategy.full_parameters().items()}
    trainer.strategy.close()
    if context.group is not None:
        dist.barrier()
    return Trained(losses, parameters)


@cache
def alone(model: str, optimizer: str, precision: str, clip_norm: float | None, steps: int) -> Trained:
    """The same on one process, with the whole batch at once."""
    torch.set_num_threads(1)
    job = ss.Job(
        model=MODELS[model], data="python-source", strategy="single", world_size=1, batch=BATCH, precision=precision,
        optimizer=OPTIMIZERS[optimizer], clip_norm=clip_norm, steps=steps,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        context = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        return train(job, range(1, steps + 1), None, folder, context)


def _run(
    pools: Pools,
    job: ss.Job,
    steps: range,
    root: Path,
    name: str,
    before: str | None = None,
    *,
    saves: bool = False,
) -> list[Trained]:
    pool = pools(max(job.world_size, 2))
    body = partial(train, job, steps, before, str(root / name), saves=saves)
    (root / f"{name}-events").mkdir()
    found: list[Trained] = pool.run(partial(_first_only, body, job.world_size), root / f"{name}-events")
    return found[: job.world_size]


def _first_only(body: Callable[[RankContext], Trained], world_size: int, context: RankContext) -> Trained:
    """Call `body` on the ranks of the job; a job of one rank runs on the first of the pool's."""
    return body(context) if context.rank < world_size else Trained([], {})


def _refused(sentences: set[str]) -> Ending:
    """An ending by refusal; the same sentence on all ranks, which says what to do."""
    sentence = min(sentences, key=len)
    is_clear = len(sentences) == 1 and "\n" not in sentence and "; " in sentence
    return Ending("refused" if is_clear else "unclear refusal", not is_clear, {"sentence": sorted(sentences)})


def _compared(expected: Trained, losses: list[float], results: list[Trained], bound: float) -> Ending:
    worst = max(
        abs(ours - theirs) / abs(theirs)
        for ours, theirs in zip(losses, expected.losses, strict=True)
        if theirs
    )
    parted = max(relative_difference(each.parameters, expected.parameters) for each in results)
    details = {"losses": worst, "parameters": parted}
    if not max(worst, parted) <= bound:
        return Ending("other losses" if worst > bound else "other parameters", True, details)
    return Ending("equal", details=details)


# The grid: layouts × settings.


@dataclass(frozen=True)
class Setting:
    """A layout and the settings of a job."""

    drawn: Mapping[str, Any]
    optimizer: str
    precision: str
    clip_norm: float | None

    def __str__(self) -> str:
        return f"{told(self.drawn)} {self.optimizer} {self.precision} clip={self.clip_norm}"


def told(drawn: Mapping[str, Any]) -> str:
    """The drawn fields that are not their defaults, in words."""
    usual = ss.Layout()
    own = {name: value for name, value in drawn["layout"].items() if value != getattr(usual, name)}
    rest = {name: value for name, value in drawn.items() if name != "layout"}
    return " ".join(f"{name}={value}" for name, value in {**own, **rest}.items() if name != "global_batch")


def draw_model(source: random.Random) -> str:
    """The name of a model, with experts or without."""
    return "mixture" if source.random() < WITH_EXPERTS else "gpt"


def draw_setting(number: int, seed: int = 0) -> Setting:
    """The layout and settings of a number of the grid."""
    source = random.Random(f"{seed}/{number}")
    return Setting(
        draw_layout(source, model=draw_model(source)),
        source.choice(sorted(OPTIMIZERS)),
        source.choice(["fp64", "fp64", "fp32"]),
        source.choice([None, 0.5]),
    )


def hold(case: Setting, pools: Pools, root: Path) -> Ending:
    """Train one job of the grid, and compare it with one process."""
    changes = {
        "precision": case.precision,
        "clip_norm": case.clip_norm,
        "optimizer": OPTIMIZERS[case.optimizer],
    }
    try:
        job = job_of(case.drawn, steps=STEPS, **changes)
    except ShardscopeError as error:
        return _refused({str(error)})
    results = _run(pools, job, range(1, STEPS + 1), root, "grid")
    if any(each.refusal for each in results):
        return _refused({each.refusal for each in results})
    expected = alone(model_of(case.drawn), case.optimizer, case.precision, case.clip_norm, STEPS)
    losses = mean_losses([(each.losses, {}) for each in results])
    return _compared(expected, losses, results, TOLERANCE[case.precision])


# Pairs: saved under one layout, resumed under another.


@dataclass(frozen=True)
class Pair:
    """Two layouts of the same job."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    optimizer: str
    clip_norm: float | None

    def __str__(self) -> str:
        return f"{told(self.before)} | {told(self.after)} | {self.optimizer} clip={self.clip_norm}"


def draw_pair(number: int, seed: int = 0) -> Pair:
    """Two layouts that jobs can train."""
    source = random.Random(f"{seed}/{number}")
    optimizer, clip_norm = source.choice(sorted(OPTIMIZERS)), source.choice([None, 0.5])
    settings = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": clip_norm}
    model = draw_model(source)
    return Pair(*draw_trainable(source, settings=settings, model=model), optimizer, clip_norm)


def draw_trainable(
    source: random.Random,
    world_sizes: Sequence[int] = WORLD_SIZES,
    settings: Mapping[str, Any] | None = None,
    model: str = "gpt",
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Two different layouts that jobs with these settings can train."""
    layouts: list[Mapping[str, Any]] = []
    while len(layouts) < 2:
        drawn = draw_layout(source, world_sizes, model)
        try:
            job_of(drawn, **(settings or {}))
        except ShardscopeError:
            continue
        if drawn not in layouts:
            layouts.append(drawn)
    return layouts[0], layouts[1]


def resume(pair: Pair, pools: Pools, root: Path) -> Ending:
    """Train the first half under one layout and the second under the other; compare it all with one process."""
    settings = {"optimizer": OPTIMIZERS[pair.optimizer], "clip_norm": pair.clip_norm, "steps": STEPS}
    half = STEPS // 2
    first = _run(pools, job_of(pair.before, **settings), range(1, half + 1), root, "first", saves=True)
    if any(each.refusal for each in first):
        return _refused({each.refusal for each in first})
    saved = str(root / "first" / "checkpoints")
    second = _run(pools, job_of(pair.after, **settings), range(half + 1, STEPS + 1), root, "second", saved)
    if any(each.refusal for each in second):
        return _refused({each.refusal for each in second})
    losses = [
        *mean_losses([(each.losses, {}) for each in first]),
        *mean_losses([(each.losses, {}) for each in second]),
    ]
    expected = alone(model_of(pair.before), pair.optimizer, "fp64", pair.clip_norm, STEPS)
    return _compared(expected, losses, second, PAIR_TOLERANCE)
