"""A training step of a job's model, traced by torch on shapes: what predictions need to know of it.

    python -m shardscope.prediction.traced        reads a job as JSON on standard input, writes its trace

A notebook's kernel and a study's driver need no torch (200 MB, seconds to import), so a job without code of the user's
is traced in a process of its own. Where torch is loaded already, or the job brings functions, the trace is made in this
process, which takes a tenth of the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from shardscope.errors import DataError, SpecError, StudyError
from shardscope.spec import Job
from shardscope.spec._base import Spec
from shardscope.spec.model.table import LayerTable
from shardscope.spec.models import GPTConfig, model_config
from shardscope.spec.user_code import UserCode

_DIGIT = (1, 8, 8)
"""An image of the embedded digits."""
_FEW = 2
"""Samples of a trace where all that is held grows with them."""
_WITHIN_S = 120.0


class Traced(Spec):
    """A model's layers and step, and what it is fed."""

    table: LayerTable
    sample_bytes: float
    """Inputs and targets of one sample."""


def traced(job: Job) -> Traced:
    """The trace of a job's model, on the job's data and in its precision.

    Example:
        >>> traced(Job(model="mlp", data="digits")).sample_bytes
        264.0

    Raises:
        SpecError: The module needs real data to run, or a function of the job was not loaded with it.
        DataError: The data cannot be read.
        StudyError: The process that was to make the trace failed.
    """
    brings_code = isinstance(job.model, UserCode) or isinstance(job.data, UserCode)
    grows = not brings_code and job.precision in ("fp32", "fp64")
    samples = _FEW if grows else job.batch.per_rank(job.num_data_ranks) // job.num_micro_batches
    asked = Job(
        model=job.model,
        data=job.data,
        loss=job.loss,
        strategy="single",
        batch=samples,
        precision=job.precision,
    )
    if brings_code:
        return _trace(asked)
    return _remembered(asked.to_json())


@lru_cache(maxsize=64)
def _remembered(asked: str) -> Traced:
    return _trace(Job.from_json(asked)) if "torch" in sys.modules else _traced_elsewhere(asked)


def _traced_elsewhere(asked: str) -> Traced:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "shardscope.prediction.traced"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_WITHIN_S, check=True, input=asked,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StudyError(_failed(asked, f"it took more than {_WITHIN_S:.0f} s")) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise StudyError(_failed(asked, lines[-1])) from None
    return Traced.from_json(done.stdout)


def _failed(asked: str, reason: str) -> str:
    return (
        f"the process that was to trace a step of model={Job.from_json(asked).model!r} failed: {reason}; "
        "shardscope doctor tells whether torch works here"
    )


def _trace(job: Job) -> Traced:
    """Made in this process, which has torch; `job` is of as many samples as are to be traced."""
    import torch

    from shardscope.training.data import tensors_of
    from shardscope.training.describe import describe
    from shardscope.training.loss import resolve_loss
    from shardscope.training.models import build_model
    from shardscope.training.precision import DTYPES, weight_dtype

    state = torch.get_rng_state()
    module = build_model(_resolved(job.model)).to(weight_dtype(job.precision))
    inputs, targets = _example(job, module)
    torch.set_rng_state(state)
    short = DTYPES[job.precision] if DTYPES[job.precision] != weight_dtype(job.precision) else None
    name = job.model if isinstance(job.model, str) else job.model.name
    step = partial(describe, module, inputs, name=name, memory=True, autocast=short)
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
    import torch

    from shardscope.training.data import load_data, map_tensors, read_batch
    from shardscope.training.precision import weight_dtype

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


if __name__ == "__main__":
    print(_trace(Job.from_json(sys.stdin.read())).to_json())
