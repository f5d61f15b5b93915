"""Peak memory of steps under torch's own `fully_shard`, on one of eight ranks of which the others are faked.

    PYTHONPATH=tests python tests/analytic/fsdp2_on_torch.py

prints one line of JSON: for each of `CASES`, the bytes that torch's CPU allocator gave out at the peak, and those that
the formulas of layouts predict.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardscope as ss
from conformance.allocator import allocated
from shardscope.analytic.memory import FRAMEWORKS, stage_memory
from shardscope.spec.models import GPTConfig
from shardscope.training.models import units_of
from shardscope.training.models.gpt import GPT

RANKS = 8
CASES = (
    (8, 256, 64, 3, 1), (8, 256, 64, 3, 2), (8, 256, 64, 2, 1), (8, 256, 64, 2, 2), (4, 20000, 64, 3, 1),
    (4, 20000, 64, 2, 1), (8, 256, 512, 3, 1), (8, 256, 512, 2, 1),
)  # fmt: skip
"""Layers, vocabulary, sequence, ZeRO stage, micro-batches of one sequence."""


def measured(config: GPTConfig, zero: int, micro_batches: int) -> float:
    """Return the bytes of a rank's shards and batch, and of what a step without optimizer allocates at its peak."""
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    keeps = {} if zero == 3 else {"reshard_after_forward": False}
    model = GPT(config)
    for unit in [*units_of(model), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, **keeps)
    words = torch.randint(config.vocab, (1, config.seq))

    def step() -> None:
        scores = model(words)
        loss = cross_entropy(scores.float().flatten(0, -2), words.flatten())
        del scores
        loss.backward()

    step()
    for parameter in model.parameters():
        parameter.grad = None
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return shards + words.nbytes + allocated(lambda: [step() for _ in range(micro_batches)])[0]


def predicted(config: GPTConfig, zero: int, micro_batches: int) -> float:
    """Return the same bytes of the layout."""
    layout = ss.Layout(
        data=RANKS, zero=zero, global_batch=RANKS * micro_batches, micro_batch=1, optimizer="sgd"
    )
    torch_alone = FRAMEWORKS["fsdp2"]._replace(has_workspaces=False)
    held = stage_memory(config.transformer("gpt"), layout, framework=torch_alone)
    return float(held.total[0] - held.optimizer[0])


if __name__ == "__main__":
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    rows = []
    for layers, vocab, seq, zero, micro_batches in CASES:
        config = GPTConfig(layers=layers, hidden=256, heads=4, vocab=vocab, seq=seq)
        rows.append([measured(config, zero, micro_batches), predicted(config, zero, micro_batches)])
    print(json.dumps(rows))
    dist.destroy_process_group()
