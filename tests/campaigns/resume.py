"""A run that goes on from a checkpoint at a random step ends at the bits of the run that was never interrupted.

Strategies, optimizers, world sizes, the step and the number of steps are drawn by seed; each case trains a job once,
once in two pieces, and compares all parameters. `NOT_PROMISED` is what the toolkit does not promise to repeat.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _campaign import Outcome, run

import shardscope as ss

STRATEGIES: tuple[tuple[str, Any], ...] = (
    ("single", "single"),
    ("ring", "ring"),
    ("ring:2", "ring:2"),
    ("tree", "tree"),
    ("all-reduce", "all-reduce"),
    ("hierarchical", "hierarchical"),
    ("parameter-server", "parameter-server"),
    ("gossip", "gossip"),
    ("zero-1", "zero-1"),
    ("zero-2", "zero-2"),
    ("zero-3", "zero-3"),
    ("pipeline", "pipeline"),
)
OPTIMIZERS = ("sgd", "nesterov", "adamw", "lamb", "lars")
NOT_PROMISED = {
    "parameter-server:async": "which update comes first is decided by the clock",
    "parameter-server:ssp": "which update comes first is decided by the clock",
}
"""Strategies whose runs do not repeat themselves to the bit, resumed or not, and why."""
CASES = len(STRATEGIES) * len(OPTIMIZERS) * 3


def case(number: int, source: random.Random) -> Outcome:
    """One strategy with one optimizer on 2, 3 or 4 ranks, saved at a random step."""
    name, strategy = STRATEGIES[number % len(STRATEGIES)]
    optimizer = OPTIMIZERS[number // len(STRATEGIES) % len(OPTIMIZERS)]
    world_size = 1 if name == "single" else (2, 3, 4)[(number + number // 60) % 3]
    steps = source.randrange(4, 12)
    at = source.randrange(1, steps)
    fields: dict[str, Any] = {
        "model": "mlp", "data": "digits", "strategy": strategy, "world_size": world_size, "batch": 48,
        "optimizer": optimizer, "steps": steps, "seed": source.randrange(1000),
        "clip_norm": source.choice([None, 1.0]), "eval_every": source.choice([None, 2]),
        "lr_schedule": source.choice(["constant", "cosine"]), "record": ss.Record(parameters=True),
    }  # fmt: skip
    details = {"strategy": name, "optimizer": optimizer, "world_size": world_size, "at": at, "steps": steps}
    root = Path(tempfile.mkdtemp(prefix="shardscope-resume-"))
    try:
        job = ss.Job(**fields)
    except ss.SpecError as error:
        return Outcome("refused as a job", details={**details, "error": str(error)})
    try:
        whole = parameters(ss.launch(job, root=root).wait(120))
        first = ss.launch(job.replace(until=at), root=root).wait(120)
        rest = parameters(ss.launch(job, root=root, resume=first).wait(120))
        again = parameters(ss.launch(job, root=root).wait(120))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if any(not np.array_equal(whole[key], again[key]) for key in whole):
        return Outcome("does not repeat itself at all", violation=True, details=details)
    far = max(float(np.abs(whole[key] - rest[key]).max()) for key in whole)
    return Outcome(
        "bit-equal" if far == 0.0 else "differs", violation=far != 0.0, details={**details, "far": far}
    )


def parameters(run: ss.Run) -> dict[str, np.ndarray]:
    """All parameters of a finished run by name."""
    with np.load(run.path / "parameters.npz", allow_pickle=False) as file:
        return {str(name): file[f"value-{number}"] for number, name in enumerate(file["names"])}


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
