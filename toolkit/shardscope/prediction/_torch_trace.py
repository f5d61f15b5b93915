"""The trace of a job's model in this process, which has torch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardscope.errors import DataError, ShardscopeError, SpecError
from shardscope.prediction.traced import Traced
from shardscope.spec import Job
from shardscope.spec.models import GPTConfig, model_config
from shardscope.spec.user_code import UserCode
from shardscope.training.data import load_data, map_tensors, read_batch, tensors_of
from shardscope.training.describe import describe
from shardscope.training.loss import resolve_loss
from shardscope.training.models import build_model
from shardscope.training.precision import DTYPES, weight_dtype

_DIGIT = (1, 8, 8)
"""An image of the embedded digits."""


def trace(job: Job, *, builds: bool = True) -> Traced:
    """Of a job on one rank, of as many samples as are to be traced.

    The model is built on shapes alone, and for real only where its code needs values and `builds`.
    """
    try:
        with torch.device("meta"):
            module = build_model(_resolved(job.model))
        return _traced(job, module)
    except Exception:  # of the user's code, whatever it may be
        if not builds:
            raise
        with torch.random.fork_rng(devices=[]):
            return _traced(job, build_model(_resolved(job.model)))


def _traced(job: Job, module: nn.Module) -> Traced:
    module = module.to(weight_dtype(job.precision))
    inputs, targets = _example(job, module)
    short = DTYPES[job.precision] if DTYPES[job.precision] != weight_dtype(job.precision) else None
    name = job.model if isinstance(job.model, str) else job.model.name
    step = partial(
        describe, module, inputs, name=name, memory=True, autocast=short, recompute=(job.recompute,)
    )
    try:
        table = step(loss=resolve_loss(_resolved(job.loss)), targets=targets)
    except (SpecError, DataError):
        table = step()  # the loss looks at values, which shapes do not have
    num_bytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors_of((inputs, targets))}.values())
    return Traced(table=table, sample_bytes=num_bytes / job.batch.per_rank(1))


def _resolved(value: Any) -> Any:
    return value.function if isinstance(value, UserCode) else value


def _example(job: Job, module: Any) -> tuple[Any, Any]:
    """What the model is called with, and its targets."""
    samples, dtype = job.batch.per_rank(1), weight_dtype(job.precision)
    config = model_config(job.model) if isinstance(job.model, str) else getattr(module, "config", None)
    classes = torch.zeros(samples, dtype=torch.int64)
    if job.data in ("digits", "python-source"):
        if isinstance(config, GPTConfig):
            return classes.new_zeros(samples, config.seq), classes.new_zeros(samples, config.seq)
        if job.data == "digits":
            return torch.zeros(samples, *_DIGIT, dtype=dtype), classes
    window = {"seq": config.seq, "vocab": config.vocab} if isinstance(config, GPTConfig) else {}
    data = load_data(_resolved(job.data), seed=job.seed, **window)
    batch = read_batch(data.train, torch.arange(samples) % len(data.train))
    inputs, targets = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    return inputs, targets


def answer(asked: str, path: Path) -> None:
    """Trace the job of this JSON and leave the trace, or a line on why there is none, in a file that appears whole."""
    try:
        found = trace(Job.from_json(asked)).to_json()
    except ShardscopeError as error:
        found = json.dumps({"error": str(error)})
    part = path.with_suffix(".part")
    part.write_text(found)
    part.rename(path)
