"""A step of the toolkit against a step of a script written by hand in plain torch, same job, same ranks, interleaved.

    python tests/benchmarks/step_overhead.py [world_size]

The script shares nothing with Shardscope but the model's class: DistributedDataParallel on an unmetered gloo group,
data cut by hand, a fused AdamW, and the loss read after every step, as everybody does.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._ranks import Calls, by_toolkit, compare_on_ranks
from shardscope.training.context import RankContext
from shardscope.training.models import build_model

ROUNDS = 40
JOBS = (("gpt-nano", "python-source", 64), ("gpt-micro", "python-source", 32))


def by_hand(context: RankContext, job: ss.Job) -> Callable[[], float]:
    """The same job as one would write it in plain torch; only the model's own class is shared."""
    group = dist.new_group(backend="gloo")
    torch.manual_seed(job.seed)
    model = build_model(job.model)
    seq, share = model.config.seq, job.batch.per_rank(context.world_size)
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    source = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    order = torch.randperm((len(tokens) - 1) // seq, generator=torch.Generator().manual_seed(0))
    starts = itertools.cycle(order[context.rank :: context.world_size].split(share)[:-1])

    def step() -> float:
        rows = torch.stack([tokens[i * seq : (i + 1) * seq + 1] for i in next(starts).tolist()]).long()
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(ddp(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def calls(context: RankContext, model: str, data: str, batch: int) -> Calls:
    job = ss.Job(
        model=model, data=data, batch=batch, strategy="all-reduce", world_size=context.world_size, steps=10**6
    )
    return {"by hand": by_hand(context, job), "shardscope": by_toolkit(context, job)}


def main() -> None:
    cases = {
        f"{model}, batch {batch}": partial(calls, model=model, data=data, batch=batch)
        for model, data, batch in JOBS
    }
    compare_on_ranks(cases, rounds=ROUNDS, baseline="by hand")


if __name__ == "__main__":
    from benchmarks.step_overhead import main as run  # the ranks import this module by its name

    run()
