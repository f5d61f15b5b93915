"""What a training step of a model of the catalogue holds, traced by torch in a process of its own.

    python -m shardscope.tuning.traced MODEL        the answer as JSON, on standard output

A study's driver needs no torch (200 MB, seconds to import), and a notebook's kernel is to stay without. Where it has
loaded torch already the trace is made in it, which takes a tenth of the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from shardscope.errors import StudyError
from shardscope.spec._base import Spec
from shardscope.spec.model.table import LayerTable
from shardscope.spec.models import GPTConfig, model_config

_TARGET_BYTES = 8
_DIGIT = (1, 8, 8)
"""An image of the embedded digits; others are the user's, and not looked at here."""
_SAMPLES = 2
_WITHIN_S = 120.0


class Traced(Spec):
    """A model's layers, and what they are fed."""

    table: LayerTable
    sample_bytes: float
    """Inputs and targets of one sample."""


@cache
def traced(model: str) -> Traced:
    """The trace of a model by its name in the catalogue.

    Raises:
        StudyError: The process that was to make it failed.
    """
    if "torch" in sys.modules:
        return _trace(model)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "shardscope.tuning.traced", model]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_WITHIN_S, check=True, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StudyError(_failed(model, f"it took more than {_WITHIN_S:.0f} s")) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise StudyError(_failed(model, lines[-1])) from None
    return Traced.from_json(done.stdout)


def _failed(model: str, reason: str) -> str:
    return (
        f"the process that was to trace the memory of model={model!r} failed: {reason}; shardscope doctor tells "
        "whether torch works here"
    )


def _trace(model: str) -> Traced:
    import torch  # only in a process that has it

    from shardscope.spec.model import Model
    from shardscope.training.models import build_model

    config = model_config(model)
    state = torch.get_rng_state()
    module = build_model(model)
    torch.set_rng_state(state)
    if isinstance(config, GPTConfig):
        samples = torch.zeros(_SAMPLES, config.seq, dtype=torch.int64)
        targets = config.seq * _TARGET_BYTES
    else:
        samples, targets = torch.zeros(_SAMPLES, *_DIGIT), _TARGET_BYTES
    table = Model.from_module(module, samples, name=model, memory=True)
    return Traced(table=table, sample_bytes=samples.nbytes / _SAMPLES + targets)


if __name__ == "__main__":
    print(_trace(sys.argv[1]).to_json())
