"""PowerSGD on real ranks, against the paper's algorithm for one matrix, torch's own hook and the SVD."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn.parallel import DistributedDataParallel

import shardscope as ss
from conformance.compressor import CompressorConformance, bucket_of, carrier_of, make
from conformance.ranks import RankPool
from shardscope.analytic.communication import ring_all_reduce_bytes, stepwise_bytes
from shardscope.methods.compressors.powersgd._torch import PowerSgdCompressor
from shardscope.methods.compressors.powersgd._torch_orthogonal import orthonormalize_, unit_rows_
from shardscope.training.compression import Bucket
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

STEPS = 5
MATRICES: list[tuple[int, ...]] = [(40, 24), (9,), (12, 5, 3, 2)]


class TestPowerSgd(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("powersgd"),
        ss.Compression("powersgd", rank=1, feedback=False),
        ss.Compression("powersgd", rank=256),
    ]


def noise(rank: int, step: int, shapes: list[tuple[int, ...]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(sum(torch.Size(shape).numel() for shape in shapes), generator=generator)


def mean_of(compressor: PowerSgdCompressor, context: RankContext, flat: torch.Tensor, step: int,
            shapes: list[tuple[int, ...]]) -> torch.Tensor:  # fmt: skip
    bucket = bucket_of(flat.clone(), step, shapes)
    compressor.mean_(bucket, carrier_of(context))
    return bucket.flat


def plain_powersgd(
    gradients: list[list[np.ndarray]], start: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Vogels et al. 2019, algorithms 1 and 2, for one matrix: gradients by step and rank, the first Q.

    Returns the mean's approximation by step, and every rank's error at the end.
    """
    factor, errors, means = start, [np.zeros_like(matrix) for matrix in gradients[0]], []
    for step in gradients:
        values = [matrix + error for matrix, error in zip(step, errors, strict=True)]
        left, _ = np.linalg.qr(np.mean([value @ factor for value in values], axis=0))
        rights = [value.T @ left for value in values]
        errors = [value - left @ right.T for value, right in zip(values, rights, strict=True)]
        factor = np.mean(rights, axis=0)
        means.append(left @ factor.T)
    return means, errors


def test_it_follows_the_algorithm_written_out_for_one_matrix(pool: RankPool, tmp_path: Path) -> None:
    first, second = (np.random.default_rng(k).normal(size=(columns, 2)) for k, columns in enumerate((24, 30)))

    def body(context: RankContext) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        compressor = PowerSgdCompressor(2, feedback=True, seed=1)
        compressor.load_state_dict(
            {"factor.p0": torch.from_numpy(first.T), "factor.p2": torch.from_numpy(second.T)}
        )
        steps = range(1, STEPS + 1)
        means = [
            mean_of(compressor, context, noise(context.rank, step, MATRICES), step, MATRICES)
            for step in steps
        ]
        return means, compressor.state_dict()

    results = pool.run(body, tmp_path)
    for start, cut, shape, name in (
        (first, slice(0, 960), (40, 24), "p0"),
        (second, slice(969, None), (12, 30), "p2"),
    ):
        given_ = [
            [noise(r, s, MATRICES)[cut].view(shape).double().numpy() for r in range(pool.world_size)]
            for s in range(1, STEPS + 1)
        ]
        means, errors = plain_powersgd(given_, start)
        for rank, (ours, state) in enumerate(results):
            for mean, flat in zip(means, ours, strict=True):
                np.testing.assert_allclose(flat[cut].view(shape).numpy(), mean, atol=2e-5)
            np.testing.assert_allclose(state[f"residual.{name}"].view(shape).numpy(), errors[rank], atol=5e-5)


def test_what_is_left_out_is_not_lost(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
        compressor = PowerSgdCompressor(1, feedback=True, seed=1)
        arrived = sum(
            mean_of(compressor, context, noise(context.rank, step, MATRICES), step, MATRICES)
            for step in range(1, STEPS + 1)
        )
        kept = compressor.state_dict()
        return torch.as_tensor(arrived), torch.cat([kept[f"residual.p{i}"] for i in range(len(MATRICES))])

    results = pool.run(body, tmp_path)
    sent = sum(noise(r, s, MATRICES) for r in range(pool.world_size) for s in range(1, STEPS + 1))
    left = sum(residual for _, residual in results)
    assert float(torch.as_tensor(left).norm()) > 1
    assert torch.allclose(pool.world_size * results[0][0] + left, torch.as_tensor(sent), atol=1e-4)


def slowly_falling(rank: int) -> torch.Tensor:
    """A constant gradient whose mean has singular values 1, 0.8, 0.64, ...; the ranks differ by noise."""
    generator = torch.Generator().manual_seed(7)
    left, right = (torch.linalg.qr(torch.randn(n, 20, generator=generator))[0] for n in (40, 24))
    mean = left @ torch.diag(0.8 ** torch.arange(20)) @ right.T
    return (mean + (0.1 if rank == 0 else 0) * torch.randn(40, 24, generator=generator)).flatten()


def best_error(matrix: torch.Tensor, rank: int) -> float:
    """Of the best approximation of that rank, in the Frobenius norm (Eckart and Young 1936)."""
    return float(torch.linalg.svdvals(matrix)[rank:].square().sum().sqrt())


def test_a_constant_gradient_comes_to_its_best_approximation(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[torch.Tensor]:
        compressor = PowerSgdCompressor(3, feedback=False, seed=1)
        own = slowly_falling(context.rank)
        return [mean_of(compressor, context, own, step, [(40, 24)]) for step in range(1, 31)]

    means = pool.run(body, tmp_path)[0]
    truth = torch.stack([slowly_falling(rank) for rank in range(pool.world_size)]).mean(dim=0)
    best = best_error(truth.view(40, 24), 3)
    errors = [float((flat - truth).norm()) for flat in means]
    assert errors[0] > 1.1 * best
    assert best * (1 - 1e-5) <= errors[-1] < 1.0005 * best


def test_torchs_own_hook_comes_to_the_same(pool: RankPool, tmp_path: Path) -> None:
    """It works with a single bucket only, and draws other first factors."""

    def body(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
        own = slowly_falling(context.rank).view(40, 24)
        theirs = DistributedDataParallel(nn.Linear(24, 40, bias=False))
        state = torch_hook.PowerSGDState(
            None, matrix_approximation_rank=3, start_powerSGD_iter=2, use_error_feedback=False
        )
        theirs.register_comm_hook(state, torch_hook.powerSGD_hook)
        ours = PowerSgdCompressor(3, feedback=False, seed=1)
        for step in range(1, 41):
            theirs.zero_grad()
            (theirs(torch.eye(24)) * own.T).sum().backward()
            mean = mean_of(ours, context, own.flatten(), step, [(40, 24)])
        gradient = theirs.module.weight.grad
        assert gradient is not None
        return mean.view(40, 24), gradient

    for ours, theirs in pool.run(body, tmp_path):
        assert float((ours - theirs).norm()) < 2e-3 * float(theirs.norm())


@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e18])
def test_a_gradient_of_low_rank_goes_through_whole(scale: float, pool: RankPool, tmp_path: Path) -> None:
    def gradient(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        shared = torch.randn(2, 24, generator=torch.Generator().manual_seed(9))
        return scale * (torch.randn(40, 2, generator=generator) @ shared).flatten()

    def body(context: RankContext) -> list[torch.Tensor]:
        compressor = PowerSgdCompressor(4, feedback=True, seed=1)
        own = gradient(context.rank)
        return [mean_of(compressor, context, own, step, [(40, 24)]) for step in (1, 2, 3)]

    truth = torch.stack([gradient(rank) for rank in range(pool.world_size)]).mean(dim=0)
    for flat in pool.run(body, tmp_path)[0]:
        assert torch.allclose(flat / scale, truth / scale, atol=1e-4)


def test_directions_that_were_lost_come_back(pool: RankPool, tmp_path: Path) -> None:
    """A step of zeros leaves no factor to go on from, and one of rank 1 only one direction."""
    column, row = torch.ones(40, 1), torch.arange(1.0, 25.0)[None]
    full = torch.randn(40, 3, generator=torch.Generator().manual_seed(3)) @ torch.randn(
        3, 24, generator=torch.Generator().manual_seed(4)
    )

    def body(context: RankContext) -> torch.Tensor:
        compressor = PowerSgdCompressor(3, feedback=False, seed=1)
        for step, matrix in enumerate((torch.zeros(40, 24), column @ row), start=1):
            mean_of(compressor, context, matrix.flatten(), step, [(40, 24)])
        return mean_of(compressor, context, full.flatten(), 3, [(40, 24)])

    assert torch.allclose(pool.run(body, tmp_path)[0].view(40, 24), full, atol=1e-3)


def test_buckets_without_matrices_go_as_they_are_in_one_message(pool: RankPool, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(7,), (), (3, 2)]  # rank 2 would not pay

    def body(context: RankContext) -> tuple[torch.Tensor, int, list[int]]:
        compressor = PowerSgdCompressor(2, feedback=True, seed=1)
        context.meter.drain()
        bucket = bucket_of(noise(context.rank, 1, shapes).double(), 1, shapes)
        compressor.mean_(bucket, carrier_of(context))
        empty = Bucket([], [], torch.empty(0), 1)
        compressor.mean_(empty, carrier_of(context))
        traffic = context.meter.drain()[0]
        return bucket.flat, sum(row["calls"] for row in traffic.values()), [
            row["sent_bytes"] for row in traffic.values()
        ]  # fmt: skip

    results = pool.run(body, tmp_path)
    truth = torch.stack([noise(rank, 1, shapes) for rank in range(pool.world_size)]).mean(dim=0)
    expected = ss.Compression("powersgd", rank=2).bucket_bytes(shapes, pool.world_size)
    for rank, (flat, calls, sent) in enumerate(results):
        assert flat.dtype == torch.float64
        assert torch.allclose(flat.float(), truth, atol=1e-6)
        assert calls == 1
        assert sent == [expected[rank]]


@pytest.mark.parametrize("method", ["powersgd", "adaptive-rank"])
def test_a_warmup_sends_gradients_as_they_are_and_leaves_nothing_behind(
    method: str, pool: RankPool, tmp_path: Path
) -> None:
    """The mean itself at ring's bytes; the first compressed step is what it would be without steps before it."""
    warm = ss.Compression(method, rank=2, warmup_steps=2)

    def body(context: RankContext) -> tuple[list[torch.Tensor], list[int], torch.Tensor]:
        compressor, alone = make(warm, context), make(ss.Compression(method, rank=2), context)
        assert isinstance(compressor, PowerSgdCompressor)
        assert isinstance(alone, PowerSgdCompressor)
        means, sent = [], []
        for step in (1, 2, 3):
            context.meter.drain()
            means.append(mean_of(compressor, context, noise(context.rank, step, MATRICES), step, MATRICES))
            sent.append(sum(row["sent_bytes"] for row in context.meter.drain()[0].values()))
        return means, sent, mean_of(alone, context, noise(context.rank, 3, MATRICES), 3, MATRICES)

    world_size = pool.world_size
    elements = sum(torch.Size(shape).numel() for shape in MATRICES)
    for rank, (means, sent, alone) in enumerate(pool.run(body, tmp_path)):
        for step in (1, 2):
            truth = torch.stack([noise(other, step, MATRICES) for other in range(world_size)]).mean(dim=0)
            assert torch.allclose(means[step - 1], truth, atol=1e-6)
            assert sent[step - 1] == ring_all_reduce_bytes(elements, 4, world_size)[rank]
        assert torch.equal(means[2], alone)
        assert sent[2] == warm.bucket_bytes(MATRICES, world_size)[rank]


@pytest.mark.slow
def test_a_resumed_run_ends_its_warmup_at_the_same_step() -> None:
    """And sends at every step what the formula says."""
    whole = ss.Job(
        model="mlp", data="digits", strategy="ring", world_size=2, batch=16, steps=5, optimizer="adamw",
        compression=ss.Compression("powersgd", rank=2, warmup_steps=3),
    )  # fmt: skip
    first = ss.launch(whole.replace(until=2)).wait(60)
    second = ss.launch(whole, resume=first).wait(60)
    once = ss.launch(whole).wait(60)
    assert second.metrics()["loss"].tolist() == once.metrics()["loss"].tolist()[2:]
    buckets = ss.predict(whole).step.buckets(whole.strategy.bucket_mb)
    for run in (first, second, once):
        for event in run.events("step"):
            sent = stepwise_bytes(run.job.compression, buckets, 2, step=event["step"], steps=5)
            own = [row for name, row in event["traffic"].items() if name.startswith("ring")]
            assert sum(row["sent_bytes"] for row in own) == sent[event["rank"]]


def test_a_warmup_of_the_whole_run_is_refused() -> None:
    with pytest.raises(ss.SpecError, match=r"warmup_steps=5 covers all steps=5, so powersgd .* use 0 to 4"):
        ss.Job(model="mlp", data="digits", world_size=2, steps=5,
               compression=ss.Compression("powersgd", warmup_steps=5))  # fmt: skip


def test_cutting_buckets_anew_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    """Factors and residuals go by the names of tensors, wherever they lie."""
    sizes = [torch.Size(shape).numel() for shape in MATRICES]
    cuts = {1: [[0, 1, 2]], 2: [[2], [1, 0]], 3: [[1, 2], [0]]}

    def body(context: RankContext, *, is_cut: bool) -> list[torch.Tensor]:
        compressor = PowerSgdCompressor(2, feedback=True, seed=1)
        steps = []
        for step in cuts:
            pieces = list(noise(context.rank, step, MATRICES).split(sizes))
            for group in cuts[step if is_cut else 1]:
                flat = torch.cat([pieces[i] for i in group])
                shapes = [torch.Size(MATRICES[i]) for i in group]
                compressor.mean_(Bucket([f"p{i}" for i in group], shapes, flat, step), carrier_of(context))
                for i, piece in zip(group, flat.split([sizes[i] for i in group]), strict=True):
                    pieces[i] = piece
            steps.append(torch.cat(pieces))
        return steps

    cut = pool.run(lambda context: body(context, is_cut=True), tmp_path)[0]
    whole = pool.run(lambda context: body(context, is_cut=False), tmp_path)[0]
    for ours, theirs in zip(cut, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("strategy", ["ring", "all-reduce"])
def test_many_buckets_cut_anew_in_a_real_model(strategy: str, pool: RankPool, tmp_path: Path) -> None:
    """They are cut by the order in which gradients came in the first backward pass; torch's own hook hangs here."""
    compression = ss.Compression("powersgd", rank=2)
    job = ss.Job(
        model="gpt-nano", data="python-source", batch=12, steps=4, world_size=pool.world_size, seed=1,
        strategy={"name": strategy, "bucket_mb": 0.05}, compression=compression,
    )  # fmt: skip

    def body(context: RankContext) -> dict[str, Any]:
        trainer = Trainer(job, context, context.events.path.parent)
        compressor = trainer.strategy.compressor
        assert isinstance(compressor, PowerSgdCompressor)
        seen: list[tuple[int, list[str], list[tuple[int, ...]]]] = []
        whole = compressor.mean_

        def mean_(bucket: Bucket, carrier: Any) -> None:
            seen.append((bucket.step, list(bucket.names), [tuple(s) for s in bucket.shapes]))
            whole(bucket, carrier)

        compressor.mean_ = mean_  # type: ignore[method-assign]
        losses = [trainer.take_step(step) for step in range(1, job.steps + 1)]
        parameters = [p.detach().clone() for p in trainer.model.parameters()]
        kept = {name: tensor.clone() for name, tensor in compressor.state_dict().items()}
        trainer.strategy.close()
        return {"losses": losses, "parameters": parameters, "seen": seen, "kept": kept}

    results = pool.run(body, tmp_path)
    seen = results[0]["seen"]
    buckets = {step: [names for at, names, _ in seen if at == step] for step in (1, 2, 3)}
    assert len(buckets[2]) > 3
    assert buckets[2] == buckets[3]
    for rank, result in enumerate(results):
        assert all(map(torch.equal, result["parameters"], results[0]["parameters"]))
        assert any(key.startswith("factor.") for key in result["kept"])
        if strategy == "ring":
            events = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
            for event in (e for e in events if e["event"] == "step"):
                expected = sum(
                    int(compression.bucket_bytes(shapes, pool.world_size)[rank])
                    for at, _, shapes in seen
                    if at == event["step"]
                )
                assert event["traffic"]["ring_all_reduce"]["sent_bytes"] == expected
    mean = [sum(r["losses"][step] for r in results) / len(results) for step in (0, -1)]
    assert mean[1] < mean[0]


@settings(max_examples=60, deadline=None)
@given(
    some.integers(1, 6), some.integers(6, 40), some.integers(0, 2**31), some.sampled_from([1e-30, 1.0, 1e15])
)
def test_rows_become_orthonormal_or_zero(rank: int, length: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(rank, length, generator=generator)
    kind = torch.randint(0, 4, (rank,), generator=generator)
    rows[kind == 0] = 0
    copied = [k for k in range(1, rank) if kind[k] == 1]
    for k in copied:
        rows[k] = 2 * rows[k - 1]
    before = rows.double()
    orthonormalize_([rows])
    gram = rows.double() @ rows.double().T
    alive = gram.diag() > 0.5
    assert torch.allclose(gram, torch.diag(alive.double()), atol=1e-5)
    assert int(alive.sum()) == rank - len(copied) - int((kind == 0).sum())
    kept = before @ rows.double().T @ rows.double()
    assert torch.allclose(kept / scale, before / scale, atol=1e-4)


def test_rows_of_zeros_have_no_direction() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-30]])
    unit_rows_([rows])
    assert torch.allclose(rows, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]]))
