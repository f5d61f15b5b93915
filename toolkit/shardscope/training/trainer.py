"""The training loop of one rank: data in, strategy's step, events out.

    rank = Trainer(job, context, folder)     builds data, model, optimizer and strategy
    state = rank.train(control)              to the last step, or to the step at which all ranks agreed to stop

The loop itself is as thin as a script written by hand; what it adds a step is one line of JSON.
"""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shardscope.errors import ShardscopeError, SpecError
from shardscope.spec import Job, UserCode
from shardscope.spec.models import GPTConfig
from shardscope.spec.user_code import Named, label_of
from shardscope.training.compression.route import choose_route
from shardscope.training.context import RankContext
from shardscope.training.data import Dataset, GlobalSampler, Loader, load_data
from shardscope.training.evaluate import evaluate
from shardscope.training.layer_watch import LayerWatch
from shardscope.training.loss import resolve_loss
from shardscope.training.memory import StepMemory
from shardscope.training.models import build_model
from shardscope.training.optim import multiplier
from shardscope.training.parameters import save_parameters
from shardscope.training.recompute import apply_recompute
from shardscope.training.strategies import StepResult, build
from shardscope.training.strategies.base import MicroBatch

FIGURES_EVERY = 10
"""Steps between two looks at what a compressor keeps; norms of residuals cost a pass over them."""


class TrainingError(ShardscopeError):
    """Training cannot go on: the loss is no longer a number."""


class Control(Protocol):
    """Says, at a step's boundary, whether this step is to be the last. The same on all ranks."""

    def should_stop(self, step: int) -> bool:
        """Whether to stop before taking `step`."""
        ...


Evaluated = Callable[[int, float], None]
"""Told on every rank, after an evaluation on the way, of the step that it followed and the seconds that step took."""


def resolve(value: Named) -> Any:
    """A catalogue name as it is, the user's callable out of its wrapping."""
    return value.function if isinstance(value, UserCode) else value


@dataclass
class Trainer:
    """One rank's training.

    Args:
        job: What to train.
        context: Which rank this is.
        folder: The run directory; checkpoints go to ``checkpoints/`` in it.
    """

    job: Job
    context: RankContext
    folder: Path

    def __post_init__(self) -> None:
        _seed_everything(self.job.seed)
        self.loss_function = resolve_loss(resolve(self.job.loss))
        self.strategy = build(self.job, self.context)
        self.model = self._model()
        self.num_params = sum(p.numel() for p in self.model.parameters())
        self.gradient_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        self.data = self._data()
        self.sampler = GlobalSampler(len(self.data.train), self.job.batch.global_size, self.job.seed)
        self.loader = self._loader()
        self.strategy.example = self._example
        self.strategy.setup(self.model)
        self.strategy.rehearse(self.loss_function)
        self.optimizer = self.strategy.build_optimizer()
        self.layers = LayerWatch(self.strategy, self.context.events)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        torch.manual_seed(self.job.seed + 1 + self.context.rank)  # dropout differs from rank to rank
        self.plan: dict[str, int] = {}
        self.first_step = 1
        self.context.meter.drain()  # what it took to start alike is no step's
        self._announce()

    def _model(self) -> nn.Module:
        model = build_model(resolve(self.job.model), dtype=self.strategy.precision.weight_dtype)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SpecError(
                f"model of type {type(model).__name__} has no parameter to train; "
                "set requires_grad on those that are to be"
            )
        apply_recompute(model, self.job.recompute)
        return model.to(self.context.device).train()

    def _data(self) -> Dataset:
        config = getattr(self.model, "config", None)
        window = {"seq": config.seq, "vocab": config.vocab} if isinstance(config, GPTConfig) else {}
        return load_data(resolve(self.job.data), seed=self.job.seed, **window)

    def _loader(self) -> Loader | None:
        rank, world_size = self.strategy.data_rank, self.job.num_data_ranks
        if rank is None:
            return None
        return Loader(self.data.train, self.sampler, rank=rank, world_size=world_size)

    def _example(self) -> MicroBatch:
        """One micro-batch of the training split, always the same."""
        job, train = self.job, self.data.train
        size = job.batch.micro_size or job.batch.per_rank(job.num_data_ranks)
        inputs, targets = train.batch(torch.arange(size) % len(train))
        return self._place(inputs), self._place(targets)

    def _announce(self) -> None:
        job, context = self.job, self.context
        context.events.emit(
            "start", world_size=context.world_size, device=str(context.device), backend=context.transport,
            strategy=job.strategy.label,
            role=job.strategy.role(context.rank, context.world_size),
            model=label_of(job.model), optimizer=job.optimizer.name, num_params=self.num_params,
            gradient_bytes=self.gradient_bytes, compression=job.compression.label,
            codecs=choose_route() if job.compression.is_on else None, **self._link(), **_process(),
        )  # fmt: skip

    def _link(self) -> dict[str, Any]:
        """What the ranks are held to, and whether they can be, for the run's own record."""
        link = self.job.link
        if link is None or self.context.group is None:
            return {}
        figures = {"bandwidth": link.bandwidth, "latency_s": link.latency_s, "label": link.label}
        return {"link": {**figures, "is_accurate": link.can_be_paced}}

    def resume(self, folder: Path) -> None:
        """Go on after the newest checkpoint in `folder`, under this job's own settings."""
        from shardscope.training import checkpoint  # imports much; only runs that save or resume need it

        saved = checkpoint.load(folder, strategy=self.strategy, optimizer=self.optimizer)
        self.first_step = saved.step + 1
        self.sampler.go_on(saved.step, saved.data)
        self.context.events.emit(
            "resume", step=saved.step, path=saved.path.name, samples=self.sampler.samples_before(saved.step),
            remembered=saved.recalled.remembered, dropped=saved.recalled.dropped, notes=saved.notes,
            **self._warmup(saved.step),
        )  # fmt: skip

    def _warmup(self, done: int) -> dict[str, int]:
        """When the uncompressed steps end or have ended, where a method begins with some."""
        compressor = self.strategy.compressor
        ends = None if compressor is None else compressor.warmup_ends(done)
        return {} if ends is None else {"warmup_ended": ends}

    def train(self, control: Control, *, evaluated: Evaluated | None = None) -> str:
        """Train to the end. Returns ``"completed"`` or ``"stopped"``."""
        self.context.meter.drain()
        step = self.first_step - 1
        with self.context.paced():  # what it took to start alike was not
            for step in range(self.first_step, self.job.last_step + 1):
                if self.strategy.stops_before(step, asked=control.should_stop(step)):
                    step -= 1  # noqa: PLW2901 - the last step taken
                    break
                started = time.perf_counter()
                self.take_step(step)
                self._after_step(step, time.perf_counter() - started, evaluated)
        return self._finish(step)

    def take_step(self, step: int) -> float | None:
        """Take one step and write its event; steps count from 1.

        Returns:
            The mean loss over this rank's samples; None on a rank that computes none.

        Raises:
            TrainingError: The loss is no longer a number.
        """
        started = time.perf_counter()
        self.context.meter.step = step
        self._set_learning_rate(step)
        with self.context.meter.span("compute", "data"):
            micro_batches = self._micro_batches(step)
        is_due = self.job.record.watches_layers(step, self.first_step)
        self.layers.begin(self.optimizer, is_due=is_due)
        with self._measured(step, micro_batches) as memory:
            result = self.strategy.step(micro_batches, self.loss_function, self.optimizer)
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self._record(step, result, micro_batches, time.perf_counter() - started)
        self._watch_plan(step)
        failed = result.loss is not None and not math.isfinite(result.loss)
        if is_due or (failed and self.job.record.layers_every):  # what went wrong is in the layers' norms
            lr = self.optimizer.param_groups[0]["lr"]
            self.layers.tell(step, self.optimizer, lr=lr, skipped=result.skipped)
        if memory is not None:
            self.context.events.emit("memory", step=step, **memory.peaks)
        if failed:
            assert result.loss is not None
            raise TrainingError(self._not_finite(result.loss))
        return result.loss

    def _measured(
        self, step: int, micro_batches: list[MicroBatch]
    ) -> AbstractContextManager[StepMemory | None]:
        """Counts memory by kind inside, if it is this step's turn."""
        if not self.job.record.measures_memory(step, self.first_step, self.job.last_step):
            return nullcontext()
        inputs = [tensor for pair in micro_batches for tensor in pair]
        return self.strategy.memory.measure(lambda: self.strategy.held(self.optimizer), inputs)

    def _not_finite(self, loss: float) -> str:
        lr = self.optimizer.param_groups[0]["lr"]
        advice = (
            "lower it, warm up longer, or set clip_norm"
            if self.job.clip_norm is None
            else "lower it or warm up"
        )
        return f"the loss became {loss} with learning rate {lr:.3g}; {advice}"

    def _set_learning_rate(self, step: int) -> None:
        factor = multiplier(self.job.schedule, step, self.job.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        if self.loader is None:
            return []
        inputs, targets = (self._place(tensor) for tensor in self.loader.batch(step - 1))
        parts = self.job.batch.accumulation(self.job.num_data_ranks)
        return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self.strategy.precision.weight_dtype if tensor.is_floating_point() else None
        return tensor.to(self.context.device, dtype)

    def _record(self, step: int, result: StepResult, micro_batches: list[MicroBatch], seconds: float) -> None:
        traffic, spans = self.context.meter.drain()
        shown = self.job.record.shows(step)
        counted = micro_batches if result.loss is not None else []
        samples = sum(len(inputs) for inputs, _ in counted)
        tokens = sum(targets.numel() for _, targets in counted) if self._reads_tokens(counted) else None
        memory = self.strategy.memory.sample()
        self.context.events.emit(
            "step", step=step, loss=result.loss, samples=samples, tokens=tokens, step_time_s=round(seconds, 6),
            lr=self.optimizer.param_groups[0]["lr"], grad_norm=result.grad_norm, skipped=result.skipped,
            loss_scale=self.strategy.precision.loss_scale,
            memory_bytes=memory, peak_memory_bytes=self.strategy.memory.peak,
            traffic=traffic, **self._codec_seconds(spans), **_noise(result), **({"spans": spans} if shown else {}),
        )  # fmt: skip
        self._watch_compression(step)

    def _codec_seconds(self, spans: list[list[Any]]) -> dict[str, float]:
        """What packing and unpacking took, where there is any."""
        if self.strategy.compressor is None:
            return {}
        return {"codec_s": round(sum(end - start for lane, _, start, end, _ in spans if lane == "codec"), 6)}

    def _watch_compression(self, step: int) -> None:
        compressor = self.strategy.compressor
        if compressor is not None and (step == self.first_step or step % FIGURES_EVERY == 0):
            self.context.events.emit("compression", step=step, figures=compressor.figures)

    def _watch_plan(self, step: int) -> None:
        """One event whenever a compressor has moved its bits or ranks; they are the same on all ranks."""
        compressor = self.strategy.compressor
        plan = {} if compressor is None else compressor.plan
        if plan != self.plan:
            self.plan = plan
            if self.context.rank == 0:
                self.context.events.emit("plan", step=step, plan=plan)

    @staticmethod
    def _reads_tokens(micro_batches: list[MicroBatch]) -> bool:
        if not micro_batches:
            return False
        inputs, targets = micro_batches[0]
        return not inputs.is_floating_point() and inputs.shape == targets.shape

    def _after_step(self, step: int, took_s: float, evaluated: Evaluated | None) -> None:
        if self.job.eval_every and step % self.job.eval_every == 0 and step < self.job.last_step:
            self._evaluate(step)
            if evaluated is not None:
                evaluated(step, took_s)
        every = self.job.checkpoint.every
        if every and step % every == 0:
            self._save(step)

    def _finish(self, last: int) -> str:
        if self.loader is not None:
            self.loader.close()
        step = self.strategy.meet(last, ending=True)
        assert step is not None  # all are ending
        state = "completed" if step >= self.job.last_step else "stopped"
        if step >= self.first_step:
            if state == "completed":  # whoever stops a run does not want to wait for an evaluation
                self._evaluate(step)
            every = self.job.checkpoint.every
            saves = self.job.checkpoint.at_end or self.job.until is not None
            if saves and not (every and step % every == 0):
                self._save(step)
            if self.job.record.parameters and state == "completed":
                save_parameters(self.folder, self.strategy)
        self.strategy.close()
        self.context.events.emit("end", state=state, steps=step)
        return state

    def _evaluate(self, step: int) -> None:
        if self.strategy.meet(step) is None:
            return
        with self.context.paced(False):
            result = evaluate(self.strategy, self.data.test, self.loss_function, self._place)
        self.context.events.emit("eval", step=step, traffic=self.context.meter.drain()[0], **result)

    def _save(self, step: int) -> None:
        if self.strategy.meet(step) is None:
            return
        from shardscope.training import checkpoint

        with self.context.paced(False):
            checkpoint.save(
                self.folder / "checkpoints", step, strategy=self.strategy, optimizer=self.optimizer,
                keep=self.job.checkpoint.keep, data=self.sampler.state_dict(),
            )  # fmt: skip
        self.context.meter.drain()  # its messages are no step's


def _seed_everything(seed: int) -> None:
    """Weights, and whatever the user's own functions draw, are the same on every rank and in every repetition."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's code may draw from the global generator
    torch.manual_seed(seed)


def _noise(result: StepResult) -> dict[str, Any]:
    return {} if result.noise is None else {"noise": result.noise.as_event()}


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}
