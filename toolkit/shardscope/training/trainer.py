"""The training loop of one rank: read data, call the strategy's step and write events.

    rank = Trainer(job, context, folder)     builds data, model, optimizer and strategy
    state = rank.train(control)              trains to the last step, or until all ranks agree to stop

Compared with a hand-written training script, the loop adds only one line of JSON per step.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from shardscope.errors import CheckpointError, ShardscopeError
from shardscope.spec import Job, UserCode
from shardscope.spec.job_parts import Data, label_of
from shardscope.spec.models import GPTConfig
from shardscope.training.computable import require_computable
from shardscope.training.context import RankContext
from shardscope.training.data import (
    Dataset,
    DataSource,
    GlobalSampler,
    Loader,
    load_data,
    map_tensors,
    read_batch,
    split,
    tensors_of,
)
from shardscope.training.evaluate import FailedTogether, evaluate
from shardscope.training.expert_watch import ExpertWatch
from shardscope.training.layer_watch import LayerWatch
from shardscope.training.lazy import is_unfinished, materialise
from shardscope.training.loss import resolve_loss
from shardscope.training.loss_weights import BatchWeights
from shardscope.training.memory import StepMemory
from shardscope.training.models import build_model
from shardscope.training.models.mixing import layers_that_depend_on_the_cut
from shardscope.training.models.trainable import require_trainable
from shardscope.training.not_finite import at_learning_rate, explained
from shardscope.training.optim.sparse import prepare_sparse_embeddings
from shardscope.training.optim.user_defined import is_user_defined
from shardscope.training.own_random_state import generators_kept
from shardscope.training.parameters import save_parameters
from shardscope.training.random_state import seed_everything
from shardscope.training.recompute import apply_recompute
from shardscope.training.run_checkpoints import RunCheckpoints
from shardscope.training.run_replicas import RunReplicas
from shardscope.training.saved_state import require_saveable, saves_state
from shardscope.training.strategies import build_strategy
from shardscope.training.strategies._sequence_check import require_loss_by_parts
from shardscope.training.strategies.base import MicroBatch
from shardscope.training.turns import Turn, Turns, codec_seconds
from shardscope.training.user_optimizer import prepare_user_optimizer
from shardscope.training.work_shares import WorkShares

if TYPE_CHECKING:
    from shardscope.training.checkpoint import Loaded

FIGURES_EVERY = 10
"""Number of steps between events with a compressor's metrics; not 1, because computing residual norms takes time."""


class TrainingError(ShardscopeError):
    """Training stopped because the loss is no longer finite."""


class EvaluationError(ShardscopeError):
    """An evaluation on held-out data failed; ``__cause__`` is the original error.

    The message contains the path of the saved model, if there is one.
    """


class Control(Protocol):
    """Decides before each step whether to stop training; the decision is the same on all ranks."""

    def should_stop(self, step: int) -> bool:
        """Return whether to stop before `step`."""


Evaluated = Callable[[int, float], None]
"""Called on every rank after an evaluation during training, with the step and the step's duration in seconds."""


def resolve(value: Data) -> Any:
    """Return the callable in a `UserCode`; a catalogue name, and shards, are returned unchanged."""
    return value.function if isinstance(value, UserCode) else value


@dataclass
class Trainer:
    """Trains one rank's part of a job.

    Args:
        job: The training job.
        context: This rank's context.
        folder: The run directory; checkpoints are written to its subfolder ``checkpoints/``.
    """

    job: Job
    context: RankContext
    folder: Path

    def __post_init__(self) -> None:
        self._not_saved = ""  # why the model could not be saved after a failed evaluation
        seed_everything(self.job.seed)
        self.loss_function = resolve_loss(resolve(self.job.loss))
        self.strategy = build_strategy(self.job, self.context)
        model = build_model(resolve(self.job.model))
        self.data = self._data(model)
        if is_unfinished(model):
            materialise(model, self._example_rows()[0])
        self.model = self._prepare_model(model)
        self.num_params = sum(p.numel() for p in self.model.parameters())
        self.gradient_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        self.sampler = GlobalSampler.of(self.data.train, self.job.batch.global_batch, self.job.seed)
        self.loader = self._loader()
        self.work = self._work_shares(self.loader)
        of_data = self.strategy.of_data
        self.weights = BatchWeights(
            of_data.job, of_data.context, self.loss_function, source=self.data.train, model=self.model, read=self._rows
        )  # fmt: skip
        self.strategy.example = self._example
        require_computable(self.model, self.strategy.precision, lambda: self._example()[0])
        if (sequence := self.strategy.sequence_split) is not None:
            require_loss_by_parts(
                self.model, self.loss_function, self.weights.count, sequence, self._example()
            )
        self.strategy.divide_model(self.model)
        self.strategy.setup(self.model)
        self.strategy.join_axes()
        self.strategy.warm_up_buckets(self.loss_function)
        self.optimizer = self.strategy.build_optimizer()
        self.layers = LayerWatch(self.strategy, self.context.events)
        self.experts = ExpertWatch(self.model, self.context.events, self.strategy)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        torch.manual_seed(
            self.job.seed + 1 + self.strategy.random_index
        )  # a different dropout on each replica
        self.replicas = RunReplicas(
            self.job, strategy=self.strategy, optimizer=self.optimizer, sampler=self.sampler
        )
        self.plan: dict[str, int] = {}
        self._memory_due: int | None = None  # the step for which memory is to be measured by type
        self.first_step = 1
        self.parameters_file: Path | None = None  # once it has been written
        self.checkpoints = RunCheckpoints(
            self.job, self.folder, strategy=self.strategy, optimizer=self.optimizer, sampler=self.sampler
        )
        self.context.meter.drain()  # traffic to broadcast the initial weights belongs to no step
        self._announce()

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare the model in its precision's dtype, on its device; raise `SpecError` if it cannot be trained."""
        require_trainable(model)
        model.to(self.strategy.precision.weight_dtype)
        prepare_sparse_embeddings(model, optimizer=self.job.optimizer, world_size=self.context.world_size)
        apply_recompute(model, self.job.recompute)
        return model.to(self.context.device).train()

    def _data(self, model: nn.Module) -> Dataset:
        config = getattr(model, "config", None)
        window = {"seq": config.seq, "vocab": config.vocab} if isinstance(config, GPTConfig) else {}
        return load_data(resolve(self.job.data), seed=self.job.seed, **window)

    def _loader(self) -> Loader | None:
        rank, world_size = self.strategy.data_rank, self.job.num_data_ranks
        if rank is None:
            return None
        ahead = 0 if self.strategy.shares_parts else None
        return Loader(self.data.train, self.sampler, rank=rank, world_size=world_size, prefetch=ahead)

    def _work_shares(self, loader: Loader | None) -> WorkShares | None:
        if loader is None:
            return None
        return WorkShares(self.strategy.of_data.job, self.strategy.of_data.context, self.strategy, loader)

    def _example(self) -> MicroBatch:
        """Return a fixed micro-batch from the training split, on this rank's device."""
        inputs, targets = self._place(self._example_rows())
        return inputs, targets

    def _example_rows(self) -> MicroBatch:
        job, train = self.job, self.data.train
        size = job.batch.micro_batch or job.batch.per_rank(job.num_data_ranks)
        return read_batch(train, torch.arange(size) % len(train))

    def _rows(self, numbers: Tensor) -> MicroBatch:
        """Return rows of the training split by their numbers, on this rank's device."""
        train = self.data.train
        with generators_kept(train):
            inputs, targets = self._place(read_batch(train, numbers))
        return inputs, targets

    def _announce(self) -> None:
        job, context, compressor = self.job, self.context, self.strategy.compressor
        compiled = compressor is not None and compressor.is_compiled
        context.events.emit(
            "start", world_size=context.world_size, device=str(context.device), backend=context.backend,
            strategy=job.strategy.label, role=job.strategy.role(context.rank, context.world_size),
            model=label_of(job.model), optimizer=job.optimizer.name, num_params=self.num_params,
            gradient_bytes=self.gradient_bytes, **self.strategy.described_transport(),
            compression=job.compression.label,
            codecs=None if compressor is None else "numba" if compiled else "torch", **context.described_link(job.link),
            pid=os.getpid(), host=socket.gethostname(), **layers_that_depend_on_the_cut(self.model),
        )  # fmt: skip
        reports = self.strategy.data_rank == 0 and self.strategy.is_first_reader
        if self.weights.note is not None and reports:
            context.events.emit("loss_note", step=0, text=self.weights.note)

    def resume(self, source: Path, *, kind: str = "disk", notes: Sequence[str] = ()) -> Loaded:
        """Load a checkpoint, or the newest complete one in a folder; training continues with this job's settings.

        Args:
            source: A checkpoint, or a folder of checkpoints.
            kind: Where the source is, for the event: ``disk``, or ``replica`` for a copy in memory.
            notes: Sentences for the user on why this source is used, for the event.

        Raises:
            CheckpointError: No checkpoint can be loaded, or it was saved after the job's last step.
        """
        from shardscope.training import checkpoint  # a slow import, needed only to save or resume

        saved = checkpoint.load(source, strategy=self.strategy, optimizer=self.optimizer)
        if saved.step > self.job.last_step:
            raise CheckpointError(
                f"checkpoint {saved.path} is from step {saved.step}, but this job ends after step "
                f"{self.job.last_step}; raise its steps (and until, if set), or resume an earlier checkpoint"
            )
        if saved.step == self.job.last_step:
            saved.notes.append(
                f"the checkpoint is from the job's last step {saved.step}: nothing was left to train"
            )
        self.first_step = saved.step + 1
        saved.notes[:0] = notes
        saved.notes.extend(self.sampler.resume(saved.step, saved.data))
        self.context.events.emit(
            "resume", step=saved.step, path=saved.path.name, source=kind,
            samples=self.sampler.samples_before(saved.step), compressor_state=saved.restored.compressor_state,
            dropped=saved.restored.dropped, notes=saved.notes, **self._warmup(saved.step),
        )  # fmt: skip
        return saved

    def _warmup(self, done: int) -> dict[str, int]:
        """Return the last step of the compressor's uncompressed warm-up, for the event; empty if it has none."""
        compressor = self.strategy.compressor
        ends = None if compressor is None else compressor.warmup_ends(done)
        return {} if ends is None else {"warmup_ended": ends}

    def train(
        self,
        control: Control,
        *,
        evaluated: Evaluated | None = None,
        is_resizing: Callable[[], bool] = lambda: False,
    ) -> str:
        """Train to the last step, or until all ranks agree to stop; return ``"completed"`` or ``"stopped"``.

        `is_resizing` is called after a stop, and returns whether a different number of ranks will continue the run.
        """
        if is_user_defined(self.job.optimizer):
            prepare_user_optimizer(self.job, self.strategy, self.optimizer)
        if saves_state(self.job):
            require_saveable(self.strategy.model)
        self.context.meter.drain()
        step = self.first_step - 1
        self.context.meter.logged_step = self.job.record.logged_step(self.first_step, self.job.last_step)
        with self.context.paced():  # the emulated link is off during setup
            for step in range(self.first_step, self.job.last_step + 1):
                if self.strategy.stops_before(step, asked=control.should_stop(step)):
                    step -= 1  # noqa: PLW2901 - the last step taken
                    break
                started = time.perf_counter()
                self.take_step(step)
                took_s = time.perf_counter() - started
                with self.context.meter.observing():
                    self._after_step(step, took_s, evaluated)
        with self.context.meter.observing():
            return self._finish(step, is_resizing)

    def take_step(self, step: int) -> float | None:
        """Take one step and write its event; steps count from 1.

        Returns:
            The loss of this rank, as in `StepResult`; None on a rank that computes no loss.

        Raises:
            TrainingError: The loss is no longer finite.
        """
        started = time.perf_counter()
        self.context.meter.step = step
        self._set_learning_rate(step)
        is_due = self.job.record.watches_layers(step, self.first_step)
        self.layers.begin(self.optimizer, is_due=is_due)
        self.experts.begin()
        if self.job.record.measures_memory(step, self.first_step, self.job.last_step):
            self._memory_due = step
        turns, micro_batches, memory = Turns(), list[MicroBatch](), None
        for part in self.strategy.batch_parts(step):
            with self.context.meter.span("compute", "data"):
                micro_batches = self._micro_batches(step, part)
            if self.strategy.compares_batches(step, self.first_step):
                with self.context.meter.observing():
                    self.strategy.require_same_batch(micro_batches)
            division = self.strategy.sequence_split
            if division is not None:
                micro_batches = [division.part(each) for each in micro_batches]
            self.strategy.loss_weights = self.weights.of(step, micro_batches, self.strategy.sample_weight)
            with self._measured(micro_batches) as measured:
                result = self.strategy.step(micro_batches, self.loss_function, self.optimizer)
            memory = measured or memory
            counts = division is None or not division.axis.rank
            turns.append(Turn.of(result, micro_batches, counts_samples=counts))
            if turns.failed:
                break
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self._record(step, turns, time.perf_counter() - started)
        self.experts.write(step)
        self._watch_plan(step)
        if is_due or (turns.failed and self.job.record.layers_every):  # the norms help to find the cause
            lr = self.optimizer.param_groups[0]["lr"]
            self.layers.write(step, self.optimizer, lr=lr, skipped=turns.result.skipped)
        if memory is not None:
            self.context.events.emit("memory", step=self._memory_due, **memory.fields())
            self._memory_due = None
        if turns.failed:
            raise TrainingError(self._not_finite(turns.failed, step, micro_batches))
        return turns.result.loss

    def _measured(self, micro_batches: list[MicroBatch]) -> AbstractContextManager[StepMemory | None]:
        """Return a context manager that measures memory by type if a measurement is due."""
        if self._memory_due is None:
            return nullcontext()
        inputs = [tensor for batch in micro_batches for tensor in tensors_of(batch)]
        return self.strategy.memory.measure(
            lambda: self.strategy.held(self.optimizer), inputs, self.strategy.module
        )

    def _not_finite(self, loss: float, step: int, micro_batches: list[MicroBatch]) -> str:
        assert self.loader is not None
        self.loader.close()  # the loader's thread uses the sampler
        lr = self.optimizer.param_groups[0]["lr"]
        rows = self.loader.rows(step - 1).chunk(len(micro_batches))
        counts = self.weights.count is not None
        data = explained(loss, step, micro_batches, rows, counts_targets=counts)
        return data or at_learning_rate(loss, lr, self.job, counts_targets=counts)

    def _set_learning_rate(self, step: int) -> None:
        factor = self.job.lr_schedule.factor(step, self.job.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def _micro_batches(self, step: int, part: int | None = None) -> list[MicroBatch]:
        if self.loader is None or self.work is None:
            return []
        return split(self._place(self.loader.batch(step - 1, part)), self.work.num_micro_batches)

    def _place(self, batch: Any) -> Any:
        """Move a batch to this rank's device, with floating-point tensors cast to the dtype of the weights."""
        return map_tensors(self._placed, batch)

    def _placed(self, tensor: Tensor) -> Tensor:
        dtype = self.strategy.precision.weight_dtype if tensor.is_floating_point() else None
        return tensor.to(self.context.device, dtype)

    def _record(self, step: int, turns: Turns, seconds: float) -> None:
        traffic, spans = self.context.meter.drain()
        waited = self.context.meter.drain_waits()
        shown, result = self.job.record.shows(step), turns.result
        shared = {"gradients": len(turns)} if self.strategy.shares_parts and self.loader is not None else {}
        memory = self.strategy.memory.sample()
        self.context.events.emit(
            "step", step=step, loss=result.loss, samples=turns.samples, tokens=turns.tokens, **shared,
            step_time_s=round(seconds, 6),
            lr=self.optimizer.param_groups[0]["lr"],
            loss_scale=self.strategy.precision.loss_scale,
            memory_bytes=memory, peak_memory_bytes=self.strategy.memory.peak,
            traffic=traffic, **self._late_seconds(), **({} if self.loader is None else self.loader.fields(step - 1)),
            **codec_seconds(self.strategy, spans), **result.as_event(), **({"waited": waited} if waited else {}),
            **({"spans": spans} if shown else {}),
        )  # fmt: skip
        if self.work is not None:
            self.work.after_step(step, spans, waited)
        self._write_late_traffic(step)
        self._watch_compression(step)

    def _write_late_traffic(self, up_to: float = math.inf) -> None:
        """Write events with logged messages, and with traffic that a server recorded too late for its step's event."""
        for step, traffic in self.context.meter.drain_late(up_to).items():
            self.context.events.emit("traffic", step=step, traffic=traffic)
        rows = self.context.meter.drain_messages()
        if rows:
            self.context.events.emit("messages", step=self.context.meter.logged_step, rows=rows)

    def _late_seconds(self) -> dict[str, float]:
        """Return the excess of compute time over the emulated processor's, in seconds; empty if none is emulated."""
        pace = self.context.meter.pace
        return {} if pace is None else {"late_s": round(pace.take_late(), 6)}

    def _watch_compression(self, step: int) -> None:
        compressor = self.strategy.compressor
        if compressor is not None and (step == self.first_step or step % FIGURES_EVERY == 0):
            self.context.events.emit("compression", step=step, figures=compressor.figures)

    def _watch_plan(self, step: int) -> None:
        """On rank 0, write an event if the compressor's `plan`, which is the same on all ranks, has changed."""
        compressor = self.strategy.compressor
        plan = {} if compressor is None else compressor.plan
        if plan != self.plan:
            self.plan = plan
            if self.context.rank == 0:
                self.context.events.emit("plan", step=step, plan=plan)

    def _after_step(self, step: int, took_s: float, evaluated: Evaluated | None) -> None:
        self.checkpoints.check()
        if self.checkpoints.interval.is_due(step, took_s):  # saved before the evaluation, as that may fail
            self._save(step)
        if self.replicas.is_due(step) and self._wait_for_all(step):
            self.replicas.save(step)
        if self.job.eval_every and step % self.job.eval_every == 0 and step < self.job.last_step:
            self._evaluate(step)
            if evaluated is not None:
                evaluated(step, took_s)

    def _finish(self, last: int, is_resizing: Callable[[], bool]) -> str:
        if self.loader is not None:
            self.loader.close()
        step = self.strategy.synchronize(last, ending=True)
        self._write_late_traffic()
        assert step is not None  # all ranks are ending
        state = "completed" if step >= self.job.last_step else "stopped"
        if step >= self.first_step or state == "completed":  # also if nothing was left to train
            is_handed_over = state == "stopped" and self.replicas.hand_over(step, is_resizing=is_resizing)
            if self.job.saves_at_end(state) and not (is_handed_over or self.checkpoints.holds(step)):
                self._save(step)
            if self.job.record.parameters and state == "completed":
                self.parameters_file = save_parameters(self.folder, self.strategy)
            if state == "completed":  # a user who stops a run should not wait for an evaluation
                # last, so that the trained model is saved if this fails
                self._evaluate(step, is_last=step >= self.job.steps)
        self.strategy.close()
        self.checkpoints.wait()
        self.context.events.emit("end", state=state, steps=step, traffic=self.context.meter.drain()[0])
        return state

    def _wait_for_all(self, step: int) -> bool:
        """Wait for all ranks after `step`, and return whether they can evaluate or save together."""
        met = self.strategy.synchronize(step) is not None
        self._write_late_traffic()
        return met

    def _evaluate(self, step: int, *, is_last: bool = False) -> None:
        """Evaluate on the validation split and, after the last step, on the test split.

        Earlier versions evaluated on the test split during training; their events do not have the field `split`.
        """
        if not self._wait_for_all(step):
            return
        if self.data.validation is not None:
            result = self._evaluated("validation", self.data.validation, step)
            self.context.events.emit("eval", step=step, split="validation", **result)
        if is_last:
            self.context.events.emit("test", step=step, **self._evaluated("test", self.data.test, step))

    def _evaluated(self, split: str, source: DataSource, step: int) -> dict[str, Any]:
        """Return the loss, accuracy and number of samples for a split, and the traffic of the evaluation."""
        try:
            with self.context.paced(False):
                result = evaluate(self.strategy, source, self.loss_function, self._place, self.weights.found)
        except FailedTogether as error:
            self._save_after_failure(step)
            cause = error.__cause__ or error
            raise EvaluationError(self._not_evaluated(split, step, cause)) from cause
        except Exception as error:
            raise EvaluationError(self._not_evaluated(split, step, error)) from error
        return {"traffic": self.context.meter.drain()[0], **result}

    def _save_after_failure(self, step: int) -> None:
        """Save a checkpoint after a failed evaluation, if the job saves checkpoints and this step has none."""
        is_missing = self.parameters_file is None and not self.checkpoints.holds(step)
        try:
            if self.job.saves_checkpoints and is_missing:
                self._save(step)
            self.checkpoints.wait()
        except CheckpointError as error:  # reported in addition to the error of the evaluation
            self._not_saved = f"; saving a checkpoint failed too: {error}"

    def _not_evaluated(self, split: str, step: int, error: BaseException) -> str:
        reason = next(iter(str(error).strip().splitlines()), "")
        what = reason if isinstance(error, FailedTogether) else f"{type(error).__name__}: {reason}"
        saved = self.parameters_file or self.checkpoints.newest
        where = "nothing was saved before it" if saved is None else f"the trained model is in {saved}"
        if saved is None and not self.job.saves_checkpoints:
            where += "; set checkpoint=Checkpoint(at_end=True) to keep the trained model"
        return (
            f"the evaluation on the {split} split after step {step} failed ({what}); {where}{self._not_saved}"
        )

    def _save(self, step: int) -> None:
        if self._wait_for_all(step):
            with self.context.paced(False):
                self.checkpoints.save(step)
