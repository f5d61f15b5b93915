"""CHOCO-SGD: as one process computes it, the mean kept, the ranks coming together, packets of exact size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.alone import Never
from conformance.compressor import SHAPES, carrier_of, gradients
from conformance.methods import carried_by
from conformance.ranks import RankPool
from oracle.updates import in_blocks
from shardscope.analytic import communication as comm
from shardscope.errors import SpecError
from shardscope.methods.strategies.gossip._torch_choco import PublicCopies
from shardscope.training.collectives.neighbours import Neighbours
from shardscope.training.compression import build_compressor
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

BLOCK = 64
METHODS = carried_by("gossip")


def job_of(world_size: int, method: ss.Compression, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {"model": "mlp", "data": "digits", "batch": 24, "strategy": "gossip", "seed": 3}
    return ss.Job(compression=method, world_size=world_size, **{**fields, **changes})


def copies_of(context: RankContext, method: ss.Compression, gamma: float | None = None) -> PublicCopies:
    job = job_of(context.world_size, method)
    compressor = build_compressor(job)
    assert compressor is not None
    compressor.forget()
    return PublicCopies(
        Neighbours(context.group, 1 << 20), compressor, carrier_of(context),
        gamma or job.strategy.step_size(method), torch.zeros(gradients(0).numel()),
        [f"p{i}" for i in range(len(SHAPES))], [torch.Size(shape) for shape in SHAPES],
    )  # fmt: skip


def apart(values: list[torch.Tensor]) -> float:
    stacked = torch.stack(values).double()
    return float((stacked - stacked.mean(dim=0)).norm())


def test_without_gradients_the_ranks_come_together_and_their_mean_stays(
    pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> list[tuple[torch.Tensor, dict[int, torch.Tensor]]]:
        found = []
        for method in METHODS:
            public, flat = copies_of(context, method), gradients(context.rank)
            for step in range(1, 26):
                public.mix_(flat, step)
            found.append((flat, public.copies))
        return found

    ranks = pool.run(body, tmp_path)
    start = [gradients(rank) for rank in range(pool.world_size)]
    mean = sum(start) / pool.world_size
    for i, method in enumerate(METHODS):
        flats = [rank[i][0] for rank in ranks]
        whole = "ratio" not in method.settings and method.name != "sign"
        assert apart(flats) < (0.05 if whole else 0.999) * apart(start), method.label
        assert torch.allclose(sum(flats) / pool.world_size, mean, rtol=0, atol=1e-4), method.label
        for rank in range(pool.world_size):  # whoever keeps a copy of a rank keeps the same
            kept = [copies[rank] for _, copies in (r[i] for r in ranks) if rank in copies]
            assert all(torch.equal(kept[0], copy) for copy in kept), method.label


def test_follows_the_algorithm_in_one_process(pool: RankPool, tmp_path: Path) -> None:
    gamma, steps, world = 0.7, 4, pool.world_size

    def body(context: RankContext) -> torch.Tensor:
        public = copies_of(context, ss.Compression("int4", block=BLOCK), gamma)
        flat = gradients(context.rank)
        for step in range(1, steps + 1):
            flat += 0.01 * gradients(context.rank, step)  # in the place of a step of one's own
            public.mix_(flat, step)
        return flat

    x = [gradients(rank).numpy().copy() for rank in range(world)]
    hat = [np.zeros_like(values) for values in x]
    neighbours = [{(rank - 1) % world, (rank + 1) % world} for rank in range(world)]
    for step in range(1, steps + 1):
        x = [values + np.float32(0.01) * gradients(rank, step).numpy() for rank, values in enumerate(x)]
        hat = [copy + in_blocks(values - copy, BLOCK, 7) for values, copy in zip(x, hat, strict=True)]
        x = [
            values + gamma / (1 + len(near)) * sum(hat[j] - hat[rank] for j in near)
            for rank, (values, near) in enumerate(zip(x, neighbours, strict=True))
        ]
    for ours, theirs in zip(pool.run(body, tmp_path), x, strict=True):
        assert np.allclose(ours.numpy(), theirs, rtol=0, atol=2e-4 * np.abs(theirs).max())


def run(job: ss.Job, context: RankContext) -> list[dict[str, Any]]:
    Trainer(job, context, context.events.path.parent).train(Never())
    return [json.loads(line) for line in context.events.path.read_text().splitlines() if line]


def test_a_mixing_sends_one_packet_to_each_neighbour(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[dict[str, Any]]:
        found = []
        for method in METHODS:
            trainer = Trainer(job_of(context.world_size, method), context, tmp_path)
            context.meter.step = 1
            trainer.strategy.mix()
            found.append(context.meter.drain()[0])
        return found

    elements = sum(p.numel() for p in mlp_parameters())
    for rank in pool.run(body, tmp_path):
        for method, traffic in zip(METHODS, rank, strict=True):
            expected = comm.gossip_mix_bytes(method.packet_bytes(elements), pool.world_size)
            assert traffic.keys() == {"gossip_packets"}
            row = traffic["gossip_packets"]
            assert row["sent_bytes"] == row["received_bytes"] == expected > 0, method.label


def mlp_parameters() -> list[torch.nn.Parameter]:
    from shardscope.training.models import build_model

    return list(build_model("mlp").parameters())


def test_trains_as_well_as_without(pool: RankPool, tmp_path: Path) -> None:
    methods = [ss.Compression("none"), ss.Compression("int8"), ss.Compression("int4")]

    def body(context: RankContext) -> list[float]:
        fields = {"steps": 25, "batch": 48, "optimizer": ss.Optimizer("adamw", lr=2e-3), "data": "digits"}
        found = []
        for method in methods:
            events = run(job_of(context.world_size, method, **fields), context)
            found.append([e["loss"] for e in events if e["event"] == "eval"][-1])
        return found

    plain, *packed = pool.run(body, tmp_path)[0]
    assert plain < 1.0  # it starts at 2.3
    assert packed == pytest.approx([plain] * 2, rel=0.03)


@pytest.mark.parametrize(
    ("compression", "strategy", "message"),
    [
        (ss.Compression("int8", feedback=True), "gossip", "has no effect with strategy='gossip'"),
        ("sign-vote", "gossip", "cannot be combined with strategy='gossip': the compression error is larger"),
        (ss.Compression("qsgd", bits=3), "gossip", "use bits=5 or a smaller block"),
        ("none", ss.Gossip(gamma=0.5), "gamma=0.5 has no effect without compression"),
        ("powersgd", "gossip", "use one of bf16, fp16"),
    ],
)
def test_what_cannot_work_is_refused(compression: Any, strategy: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job_of(2, compression, strategy=strategy)
