"""A job: the single description from which a training run is predicted, simulated and executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import registry
from shardscope.spec._base import Spec, leaving_out_unknown_fields, with_parameter
from shardscope.spec.checkpoint import Checkpoint, CheckpointOrSteps
from shardscope.spec.compression import AnyCompression, Compression
from shardscope.spec.data import check_compatible
from shardscope.spec.elastic import ElasticOrRange, at_size
from shardscope.spec.job_format import FORMAT, require_readable
from shardscope.spec.job_layout import IN_LAYOUTS, with_layout
from shardscope.spec.job_parts import (
    PRECISIONS,
    Batch,
    Data,
    JobPrecision,
    Named,
    Record,
    UserCode,
    batch_from,
    full_name,
    label_of,
)
from shardscope.spec.layout import Layout
from shardscope.spec.link import LinkOrName
from shardscope.spec.lr_schedule import AnyLRSchedule, LRSchedule
from shardscope.spec.method import Method, methods_in
from shardscope.spec.models import model_config
from shardscope.spec.numbers import Count, Seed
from shardscope.spec.optimizer import AnyOptimizer, Optimizer
from shardscope.spec.recovery import RecoveryOrNumber
from shardscope.spec.strategy import AnyStrategy, Strategy, strategies_where

if TYPE_CHECKING:
    from inspect import Signature

RECOMPUTE = ("none", "selective", "full")
LOSSES = ("cross-entropy", "mse")


class Job(Spec):
    """One training job. Immutable: `replace` returns a changed copy.

    The keyword ``layout`` takes a `Layout` in place of the fields that it states: the strategy, the number of ranks,
    and also batch, optimizer, compression, recomputation and precision if it sets them. With several degrees above 1,
    the strategy is ``mesh``; `strategy` then chooses that of the data axis, such as ``"tree"``.

    Example:
        >>> Job(model="mlp", data="digits", strategy="ring", world_size=4, steps=50).batch.per_rank(4)
        16
        >>> from shardscope.spec.layout import Layout
        >>> Job(model="gpt-nano", data="python-source", layout=Layout(data=2, tensor=2, zero=1)).world_size
        4
    """

    model: Named
    """The network to train: a built-in name such as ``"mlp"`` (all: `shardscope.spec.models.MODELS`), a callable that
    returns an `nn.Module`, such as its class, or an `nn.Module`, whose weights are copied to each rank at the start."""
    data: Data
    """What to train on: a built-in name, a path, `Shards` with settings, or a callable. ``"digits"`` has images of
    shape (batch, 1, 8, 8) with values from 0 to 1, and targets from 0 to 9; ``"python-source"`` has tokens of shape
    (batch, sequence). A path names a text, ``.npz`` or ``.npy`` file, or shards, which may be larger than memory; a
    callable returns ``(train, test)`` or ``(train, validation, test)``, and train may be an `IterableDataset`. If there
    is no validation split, half of the test rows are used for validation. Inputs and targets are tensors, or tuples or
    mappings of tensors. A model is called with the items of a tuple as positional arguments, and with those of a
    mapping as keyword arguments. A mapping with ``labels`` serves as both input and target, as Hugging Face models
    expect."""
    strategy: AnyStrategy = Field(default_factory=lambda: Strategy("ring"))
    """How the ranks share the work: a strategy, or its short string such as ``"ring"``."""
    world_size: int = Field(default=2, ge=1, le=1024)
    """Number of ranks, which are processes that train together. 1 to 1024; ``single`` runs on 1."""
    optimizer: AnyOptimizer = Field(default_factory=lambda: Optimizer("adamw"))
    """The update rule: an optimizer, or its name."""
    lr_schedule: AnyLRSchedule = Field(default_factory=lambda: LRSchedule("constant"))
    """How the learning rate changes over the steps: a schedule, or its name."""
    batch: Annotated[Batch, BeforeValidator(batch_from)] = Batch(global_batch=64)
    """Samples per step: a `Batch`, or just the global batch size."""
    compression: AnyCompression = Field(default_factory=lambda: Compression("none"))
    """How gradients are compressed for communication: a method, or its name."""
    steps: Count = 100
    """Number of optimizer steps, 1 to 2147483647."""
    until: Count | None = None
    """Last step of this run, if it ends before `steps`; at most `steps`. The learning-rate schedule and the
    data order are the same as for all `steps`, and the run saves a checkpoint to resume from. None trains all
    `steps`.
    """
    precision: Annotated[JobPrecision, BeforeValidator(full_name)] = "fp32"
    """fp32 or fp64 throughout; bf16-mixed or fp16-mixed: autocast over fp32 weights, fp16 with dynamic loss scaling.
    ``"bf16"`` and ``"fp16"`` are aliases of the mixed ones."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes: nothing, large tensors that are cheap to recompute (attention, activations),
    or whole blocks."""
    loss: Named = "cross-entropy"
    """``cross-entropy``, ``mse``, or a callable ``loss(output, target)`` that returns the mean over its samples. The
    named losses read an output's ``logits``. If the output has a ``loss``, as from a Hugging Face model given labels,
    that loss is used instead. A callable that ignores or weights some targets needs an attribute ``count``, a
    function of the targets that returns how many count; a callable that returns a sum, ``reduction = "sum"``."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum global gradient norm; larger gradients are scaled down to it. None does not clip."""
    seed: Seed = 0
    """Seed for initial weights and data order; the same job with the same seed is reproducible. 0 to 2**63 - 1."""
    eval_every: Count | None = None
    """Steps between two evaluations on the validation split, which is also evaluated after the last step; None
    evaluates only after the last step. The test split is evaluated once, after the last of all `steps`."""
    checkpoint: CheckpointOrSteps = Checkpoint()
    """When to save checkpoints: a `Checkpoint`, or just the number of steps between two."""
    elastic: ElasticOrRange | None = None
    """How many ranks the run may have while it trains, such as ``"2:8"`` or ``(2, 8)``: `Run.resize` changes their
    number. None keeps `world_size` to the end."""
    recovery: RecoveryOrNumber = None
    """What happens when a rank fails: a `Recovery`, or just the maximum number of restarts from the newest checkpoint.
    None ends the run with the error."""
    record: Record = Record()
    """How much of the run is recorded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` uses GPUs if there are any."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads per rank, independent of the world size so that runs of different sizes are comparable."""
    timeout_s: float = Field(default=60.0, gt=0, le=86400)
    """How long a rank waits for an unresponsive peer before it gives up, in seconds. 0 < value <= 86400."""
    transport: Literal["auto", "shm", "cuda-ipc", "tcp"] = "auto"
    """Transport of messages between ranks: ``shm`` is shared memory, between CPU ranks of one Linux host; ``cuda-ipc``
    lets ranks on the GPUs of one Linux host read each other's GPU memory; ``tcp`` is gloo's connections, with NCCL for
    collectives between GPUs. ``auto`` uses ``shm`` or ``cuda-ipc`` if all ranks can use it, and TCP otherwise.
    Between CPU ranks, ``shm`` and ``tcp`` give bitwise identical results, except for sums that the transport computes
    (the strategy ``all-reduce``, the evaluation of ``gossip``, gradient norms over shards): shared memory adds in the
    order of the ranks, and TCP along gloo's ring."""
    link: LinkOrName | None = None
    """Emulated link of each rank: a `Link`, or its name in the catalogue. All ranks are on one machine; each sends and
    receives at most `bandwidth` while it trains, and every message arrives `latency_s` later. None uses the machine's
    own link. A single rank sends nothing."""
    name: str | None = Field(default=None, max_length=80)
    """A name for the run directory; None derives it from strategy and model."""
    _left_out: tuple[str, ...] = PrivateAttr(default=())

    def to_json(self) -> str:
        """Return this job as indented JSON, with the format version; `from_json` reads it back."""
        return json.dumps({"format": FORMAT, **self._fields()}, indent=2, ensure_ascii=False)

    def _fields(self) -> dict[str, Any]:
        """Return the fields that are written to JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_fields(cls, fields: Any) -> Self:
        """Build the job from a mapping of field names to values, as in JSON.

        The fields of an observed training loop become an `ObservedJob`.

        Raises:
            SpecError: The JSON has a newer format than this version reads, or the job is invalid.
        """
        if isinstance(fields, dict) and "format" in fields:
            require_readable(fields["format"])
            fields = {name: value for name, value in fields.items() if name != "format"}
        if cls is Job and isinstance(fields, dict) and "observed" in fields:
            from shardscope.spec.observed import ObservedJob  # derives from this class

            return cast("Self", ObservedJob.from_fields(fields))
        return super().from_fields(fields)

    @classmethod
    def from_history(cls, text: str) -> Self:
        """Read a job for inspection only: fields added by a newer version are dropped (see `left_out`).

        Raises:
            SpecError: The JSON has a newer format than this version reads, or the job is invalid.
        """
        with leaving_out_unknown_fields() as names:
            job = cls.from_json(text)
        job._left_out = tuple(dict.fromkeys(names))  # noqa: SLF001 - an attribute of this class
        return job

    @property
    def left_out(self) -> tuple[str, ...]:
        """Fields of a newer version that were dropped when the job was read; such a job cannot be run."""
        return self._left_out

    if TYPE_CHECKING:

        def __init__(self, *, layout: Layout | Mapping[str, Any] | None = ..., **fields: Any) -> None: ...

    @classmethod
    def _signature(cls) -> Signature:
        return with_parameter(super()._signature(), "layout", Layout | None)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the copy is validated again.

        ``layout`` changes what it states. The strategy of the data axis stays if it fits the layout and no other is
        given, and a mesh keeps its `tensor_plan`.
        """
        changes = with_layout(changes, self) if changes.get("layout") is not None else changes
        job = super().replace(**changes)
        job._left_out = self._left_out  # noqa: SLF001 - an attribute of this class
        return job

    @model_validator(mode="before")
    @classmethod
    def _fill_in_for_strategy(cls, fields: Any) -> Any:
        """Fill in missing fields: one rank if the strategy allows only one, and a suitable micro-batch size."""
        if not isinstance(fields, dict):
            return fields
        strategy = Strategy.resolve(fields.get("strategy", "ring"))
        fields = {**fields, "strategy": strategy}
        if strategy.max_ranks == 1:
            fields.setdefault("world_size", 1)
        batch = fields.get("batch", 64)
        if isinstance(batch, int | dict):
            batch = batch_from(batch)
        world_size = fields.get("world_size", cls.__pydantic_fields__["world_size"].default)
        known = isinstance(batch, Batch) and type(world_size) is int
        if not known or batch.micro_batch is not None or world_size < 1:
            return fields
        micro_batch = strategy.suggested_micro_batch(batch.global_batch, world_size)
        return {**fields, "batch": batch.replace(micro_batch=micro_batch)}

    @model_validator(mode="before")
    @classmethod
    def _check_choices(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            for field, valid in (("precision", PRECISIONS), ("recompute", RECOMPUTE)):
                if field in fields and full_name(fields[field]) not in valid:
                    raise unknown_name(field, fields[field], valid)
        return fields

    @model_validator(mode="before")
    @classmethod
    def _read_layout(cls, fields: Any) -> Any:  # before the other validators, because it is the last of them
        """Replace ``layout`` by the fields that it stands for."""
        if not isinstance(fields, dict) or "layout" not in fields:
            return fields
        if fields["layout"] is None:
            return {name: value for name, value in fields.items() if name != "layout"}
        return with_layout(fields)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        self._check_names()
        if self.strategy.is_here:
            self._check_strategy()
        if self.lr_schedule.warmup_steps > self.steps:
            raise SpecError(
                f"lr_schedule.warmup_steps={self.lr_schedule.warmup_steps} is more than steps={self.steps}; "
                f"use at most {self.steps}"
            )
        if self.last_step > self.steps:
            raise SpecError(f"until={self.until} is more than steps={self.steps}; use 1 to {self.steps}")
        return self

    def _check_strategy(self) -> None:
        self._check_ranks()
        shares = self.num_data_ranks
        if not (isinstance(shares, int) and 1 <= shares <= self.world_size):
            raise SpecError(
                f"strategy={self.strategy.name!r}: num_data_ranks({self.world_size}) returned {shares!r}; it must "
                f"return an integer from 1 to {self.world_size}"
            )
        kind = "replicas" if self.strategy.is_composite else "workers"
        workers = f"the {shares} {kind} of world_size={self.world_size}"
        self.batch.accumulation_steps(shares, among=None if shares == self.world_size else workers)
        self.strategy.check(self)
        if self.compression.is_here:
            self.compression.check(self)
        if self.batch.shares is not None:
            _check_shares(self)
        if self.record.noise_scale:
            _check_noise_scale(self)
        if self.elastic is not None:
            self.elastic.check(self)
        self.checkpoint.check(self)

    def _check_ranks(self) -> None:
        name, low, high = self.strategy.name, self.strategy.min_ranks, self.strategy.max_ranks
        if self.world_size < low:
            raise SpecError(
                f"strategy={name!r} needs at least {low} ranks, got world_size={self.world_size}; "
                f"use world_size={low} or strategy='single'"
            )
        if high is not None and self.world_size > high:
            raise SpecError(
                f"strategy={name!r} runs on {high} rank, got world_size={self.world_size}; "
                f"use world_size={high} or another strategy such as 'ring'"
            )

    def _check_names(self) -> None:
        if isinstance(self.model, str):
            model_config(self.model)
            if isinstance(self.data, str):
                check_compatible(self.model, self.data)
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise unknown_name("loss", self.loss, LOSSES)

    def at_size(self, world_size: int) -> Self:
        """Return this job, which must be `elastic`, with the settings for another number of ranks.

        Raises:
            SpecError: The job cannot train on this number of ranks; the message lists those on which it can.

        Example:
            >>> Job(model="mlp", data="digits", world_size=2, batch=48, elastic="2:4").at_size(3).batch.per_rank(3)
            16
        """
        return cast("Self", at_size(self, world_size))

    @property
    def saves_checkpoints(self) -> bool:
        """Whether a run of this job can save checkpoints."""
        return self.checkpoint.is_on or self.saves_at_end("stopped")

    def saves_at_end(self, state: str) -> bool:
        """Return whether a run saves a checkpoint when it ends in `state`, such as ``"completed"`` or ``"stopped"``."""
        is_elastic = self.elastic is not None and state == "stopped"
        return self.checkpoint.at_end or self.until is not None or is_elastic

    @property
    def last_step(self) -> int:
        """The last step of a run: `until` if it is set, else `steps`."""
        return self.until or self.steps

    def progress(self, step: int) -> str:
        """Return the progress at `step`, such as ``7 of 100``; only the step number if the total is unknown."""
        return f"{step} of {self.steps}" if self.steps else f"{step}"

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks over which the global batch is divided."""
        return self.strategy.num_data_ranks(self.world_size)

    @property
    def num_state_ranks(self) -> int:
        """Number of ranks with the same part of the model, over which ZeRO partitions its states."""
        return self.strategy.num_state_ranks(self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Largest number of micro-batches that a rank, or a whole pipeline, processes in one step."""
        return self.batch.accumulation_steps(self.num_data_ranks)

    @property
    def label(self) -> str:
        """The run's name: `name` if it is given, else strategy, compression (if it is on) and model."""
        parts = [self.strategy.label.replace(":", "-"), label_of(self.model)]
        if self.compression.is_on:
            parts.insert(1, self.compression.name)
        return self.name or "-".join(parts)

    @property
    def element_bytes(self) -> int:
        """Bytes per element of the weights, gradients and optimizer moments."""
        return 8 if self.precision == "fp64" else 4

    @property
    def backward_passes(self) -> int:
        """FLOPs of a backward pass relative to a forward pass: two, plus one with full recomputation.

        In a pipeline, a split backward pass may recompute twice.
        """
        return 3 if self.recompute == "full" else 2

    def layout(self) -> Layout:
        """Return the layout that corresponds to this job, for `predict`, `plan` and the calculators.

        Two things may differ. A layout's pipeline stages have equal numbers of blocks, whereas a job's stages
        follow its `split`. Selective recomputation is torchtitan's in a layout of FSDP2, which keeps every
        other matrix product; a job keeps all of them except the inputs of the layers after attention and
        activation function.

        Example:
            >>> Job(model="gpt-nano", data="python-source", strategy="zero-3", world_size=4).layout().zero
            3

        Raises:
            SpecError: No layout corresponds to the strategy, or the precision is fp64.
        """
        degrees = self.strategy.degrees(self.world_size)
        if degrees is None:
            raise SpecError(
                f"strategy={self.strategy.label!r} has no corresponding layout, because a layout describes only "
                "replicas, equal ZeRO shards and pipeline stages; use for example strategy='ring' or 'zero-3'"
            )
        if self.batch.shares is not None and len({*self.batch.shares}) > 1:
            raise SpecError(
                f"batch.shares={self.batch.shares!r} has no corresponding layout, because replicas of a layout have "
                "equal shares; leave shares out"
            )
        if self.precision not in IN_LAYOUTS:
            raise SpecError(
                f"precision={self.precision!r} is not available in layouts; use {', '.join(map(repr, IN_LAYOUTS))}"
            )
        return Layout(
            **degrees,
            global_batch=self.batch.global_batch,
            micro_batch=self.batch.per_rank(self.num_data_ranks) // self.num_micro_batches,
            precision=IN_LAYOUTS[self.precision],
            optimizer=self.optimizer,
            compression=self.compression,
            recompute=self.recompute,
        )

    def methods(self) -> Iterator[tuple[str, Method]]:
        """Yield pairs of a field path, such as ``strategy.schedule``, and the method in that field."""
        for field in type(self).model_fields:
            yield from methods_in(field, getattr(self, field))

    @property
    def user_functions(self) -> dict[str, UserCode]:
        """User-defined functions, by field: model, data, loss."""
        values = {field: getattr(self, field) for field in type(self).model_fields}
        return {field: value for field, value in values.items() if isinstance(value, UserCode)}

    @property
    def user_code(self) -> dict[str, UserCode]:
        """User-defined functions and method classes, by field path."""
        classes = {place: method.user_code for place, method in self.methods()}
        return {
            **self.user_functions,
            **{place: code for place, code in classes.items() if code is not None},
        }

    def require_code(self) -> None:
        """Reject a job that cannot run in this process, because user-defined code is not loaded or fields were dropped.

        Raises:
            SpecError: Code or fields are missing; the message states how to get them.
        """
        if self._left_out:
            raise SpecError(
                f"this job was saved by a newer version of shardscope, and {', '.join(self._left_out)} would be "
                "ignored by this version; update shardscope to run it"
            )
        for _, method in self.methods():
            method.require_here()
        for code in self.user_code.values():
            _ = code.function  # raises SpecError if the code is not loaded

    def with_user_code(self, code: Mapping[str, Callable[..., Any]]) -> Self:
        """Return a copy of this job with the given functions and classes in place of the names of user-defined code.

        Args:
            code: Functions and method classes by field path, such as ``loss`` or ``strategy.schedule``.

        Raises:
            SpecError: A class differs in name or kind from the method that it replaces.
        """
        changes: dict[str, Any] = {}
        for place, value in code.items():
            field, _, setting = place.partition(".")
            owner = changes.get(field, getattr(self, field))
            changes[field] = (
                owner.replace(**{setting: _with_code(getattr(owner, setting), value)})
                if setting
                else _with_code(owner, value)
            )
        return self.replace(**changes)


def _with_code(named: Any, code: Callable[..., Any]) -> Any:
    if not isinstance(named, Method):
        return code
    if not (isinstance(code, type) and issubclass(code, named.base_class()) and code.name == named.name):
        raise SpecError(
            f"{code!r} is not the {named.kind} {named.name!r} of this job; give the class with that name"
        )
    registry.register_loaded(code)
    return code(**named.settings)


def _check_shares(job: Job) -> None:
    """Reject unequal shares where gradients are not averaged over all ranks at once, and so cannot be weighted.

    Raises:
        SpecError: The shares have to be equal; the message gives the reason and a remedy.
    """
    told = f"batch.shares={job.batch.shares!r} cannot be combined with"
    reason = job.strategy.needs_even_because
    if reason is not None:
        raise SpecError(
            f"{told} strategy={job.strategy.label!r}, where {reason}; leave shares out, or use another strategy, such "
            "as 'ring'"
        )
    name = job.compression.name
    if job.compression.period > 1 or job.compression.is_a_vote:
        why = (
            "ranks vote"
            if job.compression.is_a_vote
            else "each rank trains its own parameters for several steps"
        )
        raise SpecError(
            f"{told} compression={name!r}, with which {why}; leave shares out, or use another method, such as 'topk'"
        )
    if job.record.noise_scale:
        raise SpecError(
            f"{told} record.noise_scale=True, which compares gradients of equal numbers of samples; leave one of them "
            "out"
        )
    micro = job.batch.micro_batch
    if micro is not None and job.strategy.exchanges_in_passes:
        raise SpecError(
            f"{told} batch.micro_batch={micro} and strategy={job.strategy.label!r}, whose ranks communicate in each "
            "pass, so all need equally many passes; leave micro_batch out, so that each rank makes one pass"
        )


def _check_noise_scale(job: Job) -> None:
    """Reject a noise-scale measurement without two batch sizes to compare, or without the mean gradient on the ranks.

    Raises:
        SpecError: The noise scale cannot be measured; the message suggests a setting that makes it possible.
    """
    reason = job.strategy.hides_noise_because
    if reason is not None:
        able = strategies_where(lambda strategy: strategy.hides_noise_because is None)
        raise SpecError(
            f"record.noise_scale=True cannot be combined with strategy={job.strategy.label!r}, where {reason}; "
            f"use one of {', '.join(able)}"
        )
    if job.compression.period > 1:
        raise SpecError(
            f"record.noise_scale=True cannot be combined with compression={job.compression.name!r}, where each rank "
            "trains its own parameters for several steps; use another method, or compression='none'"
        )
    share = job.batch.per_rank(job.num_data_ranks)
    if job.num_data_ranks * job.num_micro_batches == 1:
        raise SpecError(
            "record.noise_scale=True compares the gradients of several micro-batches, but a single rank "
            f"with batch.micro_batch={share} has only one; "
            + (f"use a micro_batch below {share}, or more ranks" if share > 1 else "use a larger batch")
        )
