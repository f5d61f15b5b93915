"""One job of the grid: drawn from a seed, trained by the toolkit on real ranks, and held against `oracle.plain`.

A job may end in two ways. ``equal``: every loss and the parameters are the oracle's. ``refused``: one sentence that
`REFUSALS` knows. Anything else is a violation: another loss or parameter, an error that is not a sentence, a run that
does not end, and one that trains what plain torch cannot.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import shardscope as ss
from oracle import plain
from oracle.models import MODELS
from shardscope import errors
from shardscope.methods.strategies.single import Single
from shardscope.runtime.tools.check import read_parameters

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16-mixed": 2e-2}
"""Relative, of losses and of all parameters as one vector."""
AMPLIFIED = 20
"""fp32: where a job magnifies rounding, the tolerance is so many times what parts plain torch in fp32 from fp64."""
WORST = 1e-3
"""That bound is never above this."""
TIMEOUT_S = 120.0

STRATEGIES: dict[str, list[Any]] = {
    "single": [Single()],
    "all-reduce": [ss.AllReduce(), ss.AllReduce(bucket_mb=0.0005)],
    "ring": [ss.Ring(), ss.Ring(directions=2), ss.Ring(bucket_mb=0.0005, slice_mb=0.0001)],
    "tree": [ss.Tree()],
    "hierarchical": [ss.Hierarchical()],
    "zero-1": [ss.Zero1(), ss.Zero1(collectives="backend"), ss.Zero1(bucket_mb=0.0005)],
    "zero-2": [ss.Zero2(), ss.Zero2(collectives="backend"), ss.Zero2(replicas=2)],
    "zero-3": [ss.Zero3(), ss.Zero3(collectives="backend"), ss.Zero3(offload=True)],
    "parameter-server": [ss.ParameterServer(), ss.ParameterServer(servers=2, dedicated=True)],
    "gossip": [ss.Gossip(), ss.Gossip(mix_every=2)],
    "pipeline": [
        ss.Pipeline(schedule=name)
        for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
    ],
}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.05}),
    ("sgd", {"lr": 0.05, "momentum": 0.9}),
    ("nesterov", {"lr": 0.03}),
    ("adamw", {"lr": 3e-3}),
    ("lamb", {"lr": 5e-3}),
    ("lamb", {"lr": 5e-3, "variant": "apex"}),
    ("lamb", {"lr": 5e-3, "variant": "pytorch-optimizer", "weight_decay": 0.02}),
    ("lamb", {"lr": 5e-3, "variant": "v3", "trust_clip": True}),
    ("lars", {"lr": 1.0}),
    ("lars", {"lr": 1.0, "momentum_form": "torch", "norm_of": "sum"}),
    ("lars", {"lr": 1.0, "momentum_form": "post"}),
    ("lars", {"lr": 1.0, "nesterov": True}),
]
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("linear", {"warmup_steps": 2}),
    ("cosine", {"final_ratio": 0.1}),
    ("polynomial", {"warmup_steps": 1}),
    ("sqrt", {"warmup_steps": 2}),
    ("exponential", {}),
]

REFUSALS: dict[str, str] = {
    "no gradient": r"parameter '.+' has no gradient from the loss.*, but strategy='.+' needs a gradient",
    "no gradient for a server": r"parameter '.+' got no gradient, but servers need a gradient for each trained",
    "cannot be cut": r"model of type .+ cannot be split into stages; give an nn.Sequential",
    "different layers": r"in micro-batch \d+ of step \d+, rank .+ requires that all ranks use the same layers",
    "sparse gradient": r"'.+' has a sparse gradient, which (optimizer|strategy)='.+' does not support",
    "too few layers": r"the model has \d+ layers to split, fewer than the pipeline's \d+ stages",
}
"""What the toolkit may refuse where plain torch trains: the class, and what its sentence looks like."""


@dataclass(frozen=True)
class Case:
    """A job in plain terms."""

    model: str
    strategy: Any
    world_size: int
    plan: plain.Plan
    micro_batch: int
    recompute: str = "none"

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{self.model} {self.strategy.label} W={self.world_size} {plan.optimizer}{plan.settings} {plan.schedule} "
            f"batch={plan.batch}/{self.micro_batch} clip={plan.clip_norm} {plan.precision} recompute={self.recompute}"
        )

    def job(self) -> ss.Job:
        """The same in the toolkit's terms."""
        plan, brought = self.plan, MODELS[self.model]
        return ss.Job(
            model=brought.model, data=brought.data, loss=brought.loss, strategy=self.strategy,
            world_size=self.world_size, optimizer=ss.Optimizer(plan.optimizer, **plan.settings),
            lr_schedule=ss.LRSchedule(plan.schedule, **plan.shape), steps=plan.steps, clip_norm=plan.clip_norm,
            batch=ss.Batch(plan.batch, micro_batch=self.micro_batch), precision=plan.precision, seed=plan.seed,
            recompute=self.recompute, record=ss.Record(parameters=True), timeout_s=30, name="grid",
        )  # fmt: skip


PAIRS = [(model, kind) for model in MODELS for kind in STRATEGIES]
CASES = 2 * len(PAIRS)
"""Each model meets each strategy twice; all else is drawn."""


def draw(number: int, source: random.Random) -> Case:
    """The job of this number: all that the pair leaves open, drawn so that it fits together."""
    model, kind = random.Random(0).sample(PAIRS, len(PAIRS))[number % len(PAIRS)]
    strategy = source.choice(STRATEGIES[kind])
    world_size = 1 if kind == "single" else source.choice([2, 3, 4, 5])
    if getattr(strategy, "replicas", 1) > 1:
        world_size = 4
    if getattr(strategy, "dedicated", False):
        world_size = max(world_size, 3)
    workers = strategy.num_data_ranks(world_size)
    parts = 2 * world_size if kind == "pipeline" else source.choice([1, 1, 2, 3])
    micro_batch = source.choice([2, 3])
    optimizer, settings = source.choice(OPTIMIZERS)
    decay = {"weight_decay": 0.1} if source.random() < 0.5 and "weight_decay" not in settings else {}
    mask = {"exclude": "1d"} if source.random() < 0.5 else {}
    schedule, shape = source.choice(SCHEDULES)
    plan = plain.Plan(
        steps=source.choice([4, 6, 8]), batch=workers * parts * micro_batch, workers=workers, parts=parts,
        optimizer=optimizer, settings={**settings, **decay, **mask}, schedule=schedule, shape=shape,
        clip_norm=source.choice([None, None, 0.05, 0.5]), seed=source.choice([0, 1, 77]),
        precision=source.choice(["fp64", "fp64", "fp32", "bf16-mixed"]), mix_every=getattr(strategy, "mix_every", None),
    )  # fmt: skip
    recompute = source.choice(["none", "none", "none", "selective", "full"])
    return Case(model, strategy, world_size, plan, micro_batch, recompute)


class Ending(NamedTuple):
    """How a case ended."""

    name: str
    violation: bool = False
    details: dict[str, Any] = {}  # noqa: RUF012 - never written to


class Alone(NamedTuple):
    """What plain torch came to and how far rounding may take another from it; None and why where it cannot train."""

    trained: plain.Trained | None
    bound: float = 0.0
    why_not: str = ""


def alone(case: Case) -> Alone:
    """The case in plain torch."""
    model, data, loss = MODELS[case.model]
    try:
        trained = plain.train(model, data(), loss, case.plan)
        bound = TOLERANCE[case.plan.precision]
        if case.plan.precision == "fp32":
            exact = plain.train(model, data(), loss, replace(case.plan, precision="fp64"))
            rounding = plain.difference(trained.parameters, exact.parameters)
            bound = min(max(bound, AMPLIFIED * rounding), WORST)
    except RuntimeError as error:
        return Alone(None, why_not=str(error))
    return Alone(trained, bound)


def hold(case: Case, root: Path) -> Ending:
    """Train the case on ranks and hold it against the oracle."""
    expected = alone(case)
    try:
        run = ss.launch(case.job(), root=root)
        try:
            run.wait(TIMEOUT_S)
        finally:
            run.stop()
    except errors.RunFailed as error:
        return _refused(error.args[0], error.traceback, expected)
    except errors.ShardscopeError as error:
        return _refused(str(error), "", expected)
    except TimeoutError as error:
        return Ending("did not end", violation=True, details={"error": str(error)})
    return _compared(run, expected)


def _refused(sentence: str, traceback: str, expected: Alone) -> Ending:
    details = {"sentence": sentence, "traceback": traceback[-3000:], "oracle": expected.why_not}
    if traceback:
        return Ending("raw error", violation=True, details=details)
    known = next((name for name, form in REFUSALS.items() if re.search(form, sentence)), None)
    if known is None:
        return Ending("unknown refusal", violation=True, details=details)
    return Ending(f"refused: {known}", details=details)


def _compared(run: ss.Run, expected: Alone) -> Ending:
    if expected.trained is None:
        return Ending("trained what plain torch cannot", violation=True, details={"oracle": expected.why_not})
    losses = list(run.reduced().steps.column("loss"))
    of_losses = plain.losses_apart(losses, expected.trained.losses)
    of_parameters = plain.difference(read_parameters(run), expected.trained.parameters)
    details = {"losses": of_losses, "parameters": of_parameters, "bound": expected.bound}
    wrong = max(of_losses, of_parameters) > expected.bound
    return Ending("wrong" if wrong else "equal", violation=wrong, details=details)
