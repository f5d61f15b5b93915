"""Training in plain torch on one process: what every strategy must come to. Nothing here imports the toolkit.

A step takes the global batch apart as the ranks would: `workers` contiguous shares, each in `parts` micro-batches,
whose losses are means over their rows. The gradient is the mean over all micro-batches. A batch norm therefore
normalises by the rows of a micro-batch, under any number of workers; its running means, which no training step reads,
are not part of the comparison. Gossip trains one model a rank and averages each with its neighbours after the update.

The order of the rows is the documented one: epoch `e` visits them in the permutation of a NumPy generator seeded by
``SeedSequence(seed, spawn_key=(e,))``, in whole batches; what is left over of an epoch is dropped. Of data that comes
as one set, every tenth row is held out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from oracle import updates

Loss = Callable[[Any, Any], Tensor]
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda output, target: functional.cross_entropy(output.flatten(0, -2), target.flatten()),
    "mse": functional.mse_loss,
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16-mixed": torch.float32}
"""Of weights; bf16-mixed multiplies under autocast."""


@dataclass(frozen=True)
class Plan:
    """What to train, in plain terms."""

    steps: int
    batch: int
    workers: int = 1
    parts: int = 1
    """Micro-batches of one worker."""
    optimizer: str = "sgd"
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: str = "constant"
    shape: dict[str, Any] = field(default_factory=dict)
    """The schedule's settings."""
    clip_norm: float | None = None
    precision: str = "fp64"
    seed: int = 0
    mix_every: int | None = None
    """Gossip: steps between two averagings; None where gradients are averaged."""


@dataclass(frozen=True)
class Trained:
    """The mean loss over the global batch of every step, and the parameters after the last."""

    losses: list[float]
    parameters: dict[str, Tensor]


def train(make_model: Callable[[], nn.Module], data: Any, loss: str | Loss, plan: Plan) -> Trained:
    """Train a model as the plan says; raises whatever torch does where it cannot."""
    torch.manual_seed(plan.seed)
    model = make_model().to(DTYPES[plan.precision]).train()
    loss_function = LOSSES[loss] if isinstance(loss, str) else loss
    rows = held_in(len(data))
    _materialise(model, data, rows, plan)
    ranks = plan.workers if plan.mix_every else 1
    learners = [Learner(copy.deepcopy(model), loss_function, plan) for _ in range(ranks)]
    losses = []
    for step in range(1, plan.steps + 1):
        shares = rows[order(len(rows), plan, step)].chunk(plan.workers)
        micro = [[_batch(data, part, plan) for part in share.chunk(plan.parts)] for share in shares]
        if plan.mix_every is None:
            losses.append(learners[0].step(step, [pair for parts in micro for pair in parts]))
            continue
        own = [learner.step(step, parts) for learner, parts in zip(learners, micro, strict=True)]
        losses.append(sum(own) / ranks)
        if step % plan.mix_every == 0:
            mix([learner.model for learner in learners])
    return Trained(losses, mean_parameters([learner.model for learner in learners]))


def held_in(num_rows: int) -> Tensor:
    """The rows to train on."""
    rows = torch.arange(num_rows)
    return rows[rows % 10 != 9]


def order(num_rows: int, plan: Plan, step: int) -> Tensor:
    """Which of the rows make up the global batch of a step that counts from 1."""
    epoch, position = divmod(step - 1, num_rows // plan.batch)
    generator = np.random.default_rng(np.random.SeedSequence(plan.seed, spawn_key=(epoch,)))
    permuted = torch.from_numpy(generator.permutation(num_rows))
    return permuted[position * plan.batch : (position + 1) * plan.batch]


def rate(plan: Plan, step: int) -> float:
    """The schedule's factor on the learning rate at a step that counts from 1."""
    warmup, floor = plan.shape.get("warmup_steps", 0), plan.shape.get("final_ratio", 0.0)
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / max(plan.steps - warmup, 1)
    match plan.schedule:
        case "constant":
            return 1.0
        case "sqrt":
            return math.sqrt(max(warmup, 1) / step)
        case "exponential":
            return float(plan.shape.get("final_ratio", 0.01) ** progress)
        case "cosine":
            left = 0.5 + 0.5 * math.cos(math.pi * progress)
        case "linear":
            left = 1 - progress
        case "polynomial":
            left = (1 - progress) ** plan.shape.get("power", 2.0)
        case other:
            raise AssertionError(other)
    return float(floor + (1 - floor) * left)


class Learner:
    """One model with its optimizer."""

    def __init__(self, model: nn.Module, loss: Loss, plan: Plan) -> None:
        self.model, self.loss, self.plan = model, loss, plan
        self.optimizer = updates.build(plan.optimizer, plan.settings, model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, step: int, micro_batches: list[tuple[Any, Any]]) -> float:
        """One update from the mean gradient of the micro-batches; returns their mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for inputs, targets in micro_batches:
            with self._autocast():
                loss = self.loss(call(self.model, inputs), targets)
            (loss / len(micro_batches)).backward()
            total += loss.item() / len(micro_batches)
        if self.plan.clip_norm is not None:
            clip(self.model, self.plan.clip_norm)
        for group, base in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = base * rate(self.plan, step)
        self.optimizer.step()
        return total

    def _autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.plan.precision == "bf16-mixed" else nullcontext()


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a mapping goes in by keyword, a tuple by position."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def clip(model: nn.Module, max_norm: float) -> None:
    """Scale all gradients so that their norm, taken as one vector, is at most `max_norm`."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    squares = [(g.coalesce().values() if g.is_sparse else g).double().square().sum() for g in grads]
    norm = float(torch.stack(squares).sum().sqrt())
    for grad in grads:
        grad.mul_(min(1.0, max_norm / (norm + 1e-6)))


@torch.no_grad()
def mix(models: list[nn.Module]) -> None:
    """Each becomes the mean of itself and its two neighbours on a ring."""
    olds = [[p.clone() for p in model.parameters()] for model in models]
    for rank, model in enumerate(models):
        near = sorted({(rank + shift) % len(models) for shift in (-1, 0, 1)})
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter.copy_(sum(olds[other][index] for other in near) / len(near))


def mean_parameters(models: list[nn.Module]) -> dict[str, Tensor]:
    """The mean of the models, in double precision."""
    named = [dict(model.named_parameters()) for model in models]
    return {name: sum(n[name].detach().double() for n in named) / len(named) for name in named[0]}


def _batch(data: Any, rows: Tensor, plan: Plan) -> tuple[Any, Any]:
    cast = lambda leaf: leaf.to(DTYPES[plan.precision]) if leaf.is_floating_point() else leaf
    return pytree.tree_map(cast, data.batch(rows))


def _materialise(model: nn.Module, data: Any, rows: Tensor, plan: Plan) -> None:
    """Lazy parameters take their shape from one pass."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        with torch.no_grad():
            call(model, _batch(data, rows[:2], plan)[0])


def losses_apart(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of a step's loss, as a share of it or of 1 (the larger); infinite if not a number."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True)]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


def difference(ours: dict[str, Any], theirs: dict[str, Tensor]) -> float:
    """By how much all parameters, taken as one vector, differ, as a share of their norm; not a number is infinite."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    squares = [float((torch.as_tensor(ours[n]).double() - theirs[n]).square().sum()) for n in theirs]
    size = sum(float(value.square().sum()) for value in theirs.values())
    share = math.sqrt(sum(squares) / size)
    return share if math.isfinite(share) else math.inf
