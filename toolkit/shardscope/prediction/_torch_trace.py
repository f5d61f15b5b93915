"""Trace one training step of a job's model with torch, in this process."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardscope.errors import DataError, ShardscopeError, SpecError
from shardscope.methods.strategies.mesh import Mesh
from shardscope.prediction.traced import Traced
from shardscope.spec import Job
from shardscope.spec.job_parts import UserCode, label_of
from shardscope.spec.models import GPTConfig, model_config
from shardscope.training.computable import called_under_autocast, uncomputable, uncomputable_layers
from shardscope.training.data import load_data, map_tensors, read_batch, tensors_of
from shardscope.training.describe import describe
from shardscope.training.expert_axis import ExpertAxis
from shardscope.training.expert_split import ExpertSplit, ExpertTensorSplit
from shardscope.training.loss import resolve_loss
from shardscope.training.models import build_model
from shardscope.training.precision import DTYPES, weight_dtype
from shardscope.training.random_state import random_state, set_random_state
from shardscope.training.sequence import SequenceAxis, SequenceSplit
from shardscope.training.tensor import TensorAxis, TensorSplit

_CPU = torch.device("cpu")
_EVEN_LOAD = (
    "Tokens that ranks send to each other's experts, activations and times are those of an even load of experts; those "
    "of a run differ by the imbalance that it records"
)
_MAX_SAMPLES = 2
"""Maximum number of samples read from the user's own data, for their shapes and dtypes."""
_DIGIT = (1, 8, 8)
"""Shape of one image in the built-in digits data."""


def trace(job: Job, *, builds: bool = True) -> Traced:
    """Return the trace of one training step of a rank.

    The model is built on the meta device. If that fails and `builds` is true, it is built with real values. If the job
    has user code, the random generators are restored to their previous state afterwards.

    Args:
        job: The job of one replica of the model, in which each data rank gets the samples to trace.
        builds: Whether to build the model with real values if it cannot be built on the meta device.

    Raises:
        SpecError: The user's code, or a model or loss function that it returns, raises an error.
    """
    brings_code = bool(job.user_code)
    before = random_state(_CPU) if brings_code else {}
    try:
        return _by_shapes(job, builds=builds)
    except (ShardscopeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code can raise anything, even SystemExit
        raise SpecError(
            f"model={label_of(job.model)!r} cannot be traced on the meta device ({type(error).__name__}: {error}); "
            "fix the model, or run the job without a prediction"
        ) from error
    finally:
        if brings_code:
            set_random_state(before, _CPU)


def _by_shapes(job: Job, *, builds: bool) -> Traced:
    said = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, said.disabled = said.disabled, True  # it writes a traceback for each failing operation
    try:
        with torch.device("meta"):
            module = build_model(_resolved(job.model))
        return _traced(job, module)
    except Exception:
        if not builds:
            raise
        return _traced(job, build_model(_resolved(job.model)))
    finally:
        said.disabled = was_disabled


def _traced(job: Job, module: nn.Module) -> Traced:
    module = module.to(weight_dtype(job.precision))
    inputs, targets = _example(job, module)
    whole, notes = None, list[str]()
    if isinstance(job.strategy, Mesh):
        whole = describe(module, inputs, name=_name(job))
        if job.strategy.tensor > 1:
            split = TensorSplit if job.strategy.expert == 1 else ExpertTensorSplit
            split(  # that of a group's first rank, without a group
                TensorAxis(job.strategy.tensor),
                job.strategy.tensor_plan,
                cuts_sequences=job.strategy.sequence_parallel,
            ).divide(module)
        if job.strategy.expert > 1:
            ExpertSplit(ExpertAxis(job.strategy.expert)).divide(module)
            notes.append(_EVEN_LOAD)
        if job.strategy.context > 1:
            parts = SequenceSplit(SequenceAxis(job.strategy.context), job.strategy.context_comm)
            parts.install(module)
            inputs, targets = parts.part((inputs, targets))
    short = DTYPES[job.precision] if DTYPES[job.precision] != weight_dtype(job.precision) else None
    step = partial(
        describe, module, inputs, name=_name(job), memory=True, autocast=short, on_gpu=job.device == "cuda",
        recompute=(job.recompute,),
    )  # fmt: skip
    failing = {} if short is None or job.device == "cuda" else uncomputable_layers(module, short)
    with called_under_autocast(module, failing) as called:
        try:
            table = step(loss=resolve_loss(_resolved(job.loss)), targets=targets)
        except (SpecError, DataError):
            table = step()  # the loss reads values, which meta tensors do not have
    first = next((name for name in failing if name in called), None)
    why_not = (
        ""
        if first is None
        else uncomputable(first, module.get_submodule(first), failing[first], job.precision)
    )
    num_bytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors_of((inputs, targets))}.values())
    table = table.replace(notes=(*table.notes, *notes))
    return Traced(table=table, whole=whole, sample_bytes=num_bytes / _samples(job), uncomputable=why_not)


def _samples(job: Job) -> int:
    return job.batch.per_rank(job.num_data_ranks)


def _name(job: Job) -> str:
    return job.model if isinstance(job.model, str) else job.model.name


def _resolved(value: Any) -> Any:
    return value.function if isinstance(value, UserCode) else value


def _example(job: Job, module: Any) -> tuple[Any, Any]:
    """Return a batch of example inputs and targets for the model, on the meta device."""
    samples, dtype = _samples(job), weight_dtype(job.precision)
    config = model_config(job.model) if isinstance(job.model, str) else getattr(module, "config", None)
    classes = torch.empty(samples, dtype=torch.int64, device="meta")
    if job.data in ("digits", "python-source"):
        if isinstance(config, GPTConfig):
            return classes.new_empty(samples, config.seq), classes.new_empty(samples, config.seq)
        if job.data == "digits":
            return torch.empty(samples, *_DIGIT, dtype=dtype, device="meta"), classes
    window = {"seq": config.seq, "vocab": config.vocab} if isinstance(config, GPTConfig) else {}
    data = load_data(_resolved(job.data), seed=job.seed, **window)
    few = read_batch(data.train, torch.arange(min(samples, len(data.train), _MAX_SAMPLES)))

    def as_many(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty((samples, *tensor.shape[1:]), dtype=kind, device="meta")

    inputs, targets = map_tensors(as_many, few)
    return inputs, targets


def answer(asked: str, path: Path) -> None:
    """Trace the job given as JSON and write the trace, or its error message, to `path` atomically.

    Args:
        asked: The job as JSON.
        path: File to write, as JSON: the trace, or an object with the key ``error``.
    """
    try:
        found = trace(Job.from_json(asked)).to_json()
    except Exception as error:  # noqa: BLE001 - such as out of memory; the waiting process gets the reason
        found = json.dumps({"error": str(error) or type(error).__name__})
    part = path.with_suffix(".part")
    part.write_text(found)
    part.rename(path)
