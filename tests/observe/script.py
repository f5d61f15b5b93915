"""A training script as people write them: plain torch, `DistributedDataParallel` and FSDP2, alone or under torchrun.

    python script.py OUT WRAPPER...

Trains by each wrapper (plain, ddp, accumulate, fsdp2, mixed) twice: as it stands, then within `ss.observe`. Each rank
writes, by wrapper, the losses of both, and the bytes that the kernel has counted on its connections meanwhile, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardscope as ss

STEPS = 4
WIDTH = 201


class Net(nn.Sequential):
    """Layers whose sizes two ranks do not divide, and a module with buffers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 305), nn.GELU(), nn.Linear(305, WIDTH)),
            nn.Linear(WIDTH, WIDTH),
        ]
        super().__init__(*blocks, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 7))


class Double(nn.Linear):
    """A layer with weights in float64 among others in float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.double()).float()


def build(wrapper: str) -> nn.Module:
    model = Net()
    if wrapper == "mixed":
        model.append(Double(7))
    if wrapper in ("ddp", "accumulate", "mixed"):
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        for block in (model[0], model[1]):
            fully_shard(block)
        fully_shard(model)
    return model


def train(wrapper: str, observed: Path | None) -> dict[str, Any]:
    model = build(wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    parts = 2 if wrapper == "accumulate" else 1
    losses = []
    context = nullcontext() if observed is None else ss.observe(model, optimizer, name=wrapper, root=observed)
    with context:
        before = kernel_bytes()
        for _ in range(STEPS):
            optimizer.zero_grad()
            for part in range(parts):
                inputs = torch.randn(8, WIDTH, generator=generator)
                targets = torch.randint(0, 7, (8,), generator=generator)
                with model.no_sync() if part < parts - 1 else nullcontext():
                    loss = nn.functional.cross_entropy(model(inputs), targets) / parts
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            if wrapper == "mixed":
                evaluate(model)
        sent = kernel_bytes() - before
    return {"losses": losses, "sent": sent, "weights": [float(p.sum()) for p in local(model)]}


def evaluate(model: nn.Module) -> None:
    """Evaluate as people do in between steps; DDP then leaves out the next broadcast of buffers."""
    with torch.no_grad():
        model(torch.ones(8, WIDTH))


def local(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]


def kernel_bytes() -> int:
    """What the kernel has counted once everything sent has been acknowledged."""
    if not (dist.is_initialized() and sys.platform == "linux"):
        return 0
    from conformance.wire_bytes import wire_bytes

    dist.barrier()
    time.sleep(0.25)
    return wire_bytes().sent


def main(out: Path, wrappers: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    results = {
        wrapper: {"alone": train(wrapper, None), "observed": train(wrapper, out)} for wrapper in wrappers
    }
    (out / f"results-{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
