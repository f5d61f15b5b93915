"""Experts on different ranks: the data axis's strategy follows one process, and ranks send what their loads say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, Case, StrategyConformance, job, mean_losses
from shardscope.analytic.communication.experts import all_to_all_bytes
from shardscope.errors import SpecError
from shardscope.methods.strategies.mesh import Mesh
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer

CASES: list[Case] = [("fp64", 1, "selective", None), ("fp64", 3, "full", 0.5), ("fp32", 3, "none", 0.5)]
HIDDEN, EXPERTS = 16, 4


def mixed(**fields: Any) -> nn.Module:
    mixture = RoutedMixture(**{"experts": EXPERTS, "active": 2, "ffn": 8, **fields})
    return build_model(
        GPTConfig(layers=2, hidden=HIDDEN, heads=2, vocab=256, seq=16, ffn=32, mixture=mixture)
    )


def dropless() -> nn.Module:
    return mixed(shared_ffn=8, dense_layers=1)


def dropping() -> nn.Module:
    return mixed(active=1, capacity_factor=0.5, balance=0.1)


def mesh(data: ss.Strategy | str = "ring", expert: int = 2, **axes: int) -> ss.Strategy:
    return ss.Strategy("mesh", data=data, expert=expert, **axes)


class Conformance(StrategyConformance):
    model = staticmethod(dropless)
    cases: ClassVar[list[Case]] = CASES

    test_stays_near_one_process_in_bf16 = None  # type: ignore[assignment]
    """In bf16, a rounding error in a token may choose another expert, from which no bound follows."""


@pytest.mark.ranks(4)
class TestTwoExpertRanks(Conformance):
    strategy = mesh(ss.Ring(bucket_mb=0.02))


@pytest.mark.slow
@pytest.mark.ranks(2)
class TestAllRanksHaveOtherExperts(Conformance):
    strategy = mesh(ss.AllReduce(bucket_mb=0.02))
    model = staticmethod(dropping)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestFourExpertRanks(Conformance):
    strategy = mesh(ss.Tree(bucket_mb=0.02), expert=4)
    model = staticmethod(dropping)


@pytest.mark.weekly  # the slow tier resumes a checkpoint with ZeRO 1
@pytest.mark.ranks(4)
class TestZero1(Conformance):
    strategy = mesh(ss.Zero1(bucket_mb=0.02))
    cases: ClassVar[list[Case]] = CASES[1:2]


@pytest.mark.weekly  # the slow tier has it in the random layouts of tests/oracle/test_hybrid.py
@pytest.mark.ranks(4)
class TestZero3(Conformance):
    strategy = mesh("zero-3")
    cases: ClassVar[list[Case]] = CASES[1:2]


@pytest.mark.slow
@pytest.mark.ranks(4)
class TestDividedExperts(Conformance):
    strategy = mesh(ss.Ring(bucket_mb=0.02), tensor=2)
    cases: ClassVar[list[Case]] = CASES[1:2]


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestShardsBesideDividedExperts(Conformance):
    strategy = mesh("zero-3", tensor=2)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestZero2(Conformance):
    strategy = mesh("zero-2")


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestZero3WithoutOtherHolders(Conformance):
    strategy = mesh("zero-3", expert=4)
    model = staticmethod(dropping)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestZero1WithoutOtherHolders(Conformance):
    strategy = mesh("zero-1", expert=4)
    model = staticmethod(dropping)


@pytest.mark.weekly
@pytest.mark.parametrize("data", ["ring", "zero-1", "zero-2", "zero-3"])
def test_three_axes_follow_one_process(eight: RankPool, tmp_path: Path, data: str) -> None:
    class Triple(Conformance):
        strategy = mesh(data, tensor=2)

    Triple().follow(
        eight, tmp_path, optimizer="lamb", precision="fp64", accumulation=3, recompute="full", clip_norm=0.5
    )


def job_of(model: Any = dropless, **fields: Any) -> ss.Job:
    fields = {"strategy": mesh(), "world_size": 4, "batch": ss.Batch(16, micro_batch=2), **fields}
    return ss.Job(model=model, data="python-source", steps=2, **fields)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", [dropless, dropping])
@pytest.mark.parametrize(
    ("strategy", "recompute"),
    [
        (mesh(), "none"),
        (mesh(), "full"),
        (mesh("zero-3"), "full"),
        (mesh(tensor=2), "full"),
        (mesh(context=2), "none"),
    ],
)
def test_ranks_send_what_their_recorded_loads_say(
    pool: RankPool, tmp_path: Path, model: Any, strategy: Mesh, recompute: str
) -> None:
    job = job_of(model, strategy=strategy, recompute=recompute)

    def body(context: RankContext) -> list[dict[str, Any]]:
        trainer = Trainer(job, context, context.events.path.parent)
        for step in (1, 2):
            trainer.take_step(step)
        trainer.strategy.close()
        rows = context.events.path.read_text().splitlines()
        return [event for event in map(json.loads, rows) if event.get("step") == 2]

    ranks = pool.run(body, tmp_path)
    kept = []
    for events in ranks[:: strategy.tensor]:  # ranks of a tensor group have the same tokens
        (loads,) = [event for event in events if event["event"] == "experts"]
        rows = zip(loads["assigned"], loads["dropped"], strict=True)
        kept.append([[there - lost for there, lost in zip(*row, strict=True)] for row in rows])
    assert len({json.dumps(each) for each in kept}) == job.num_state_ranks  # uneven: ranks have other tokens
    passes, parts = 2 if recompute == "full" else 1, job.num_micro_batches
    for group in strategy.groups("expert", 4):
        said = all_to_all_bytes(
            [kept[rank // strategy.tensor] for rank in group],
            hidden=HIDDEN, element_bytes=4, micro_batches=parts, forward_passes=passes,
        )  # fmt: skip
        for rank, num_bytes in zip(group, said, strict=True):
            (step,) = [event for event in ranks[rank] if event["event"] == "step"]
            assert step["traffic"]["expert:all_to_all"]["sent_bytes"] == num_bytes


CHAIN = (
    mesh("zero-1"), mesh(expert=4), mesh("zero-3"), mesh("zero-1", tensor=2), ss.Strategy("ring"), mesh("zero-2", 4),
    mesh("tree", tensor=2), mesh("zero-1"),
)  # fmt: skip


def _through_degrees(folder: str, context: RankContext) -> list[float | None]:
    """Losses of a job that resumes under another strategy after every second step."""
    losses: list[float | None] = []
    for number, strategy in enumerate(CHAIN):
        here = Path(folder) / str(number)
        here.mkdir(exist_ok=True)
        trainer = Trainer(of_steps(strategy), context, here)
        if number:
            trainer.resume(Path(folder) / str(number - 1) / "checkpoints")
        losses += [trainer.take_step(step) for step in (2 * number + 1, 2 * number + 2)]
        trainer.checkpoints.save(2 * number + 2)
        trainer.strategy.close()
        dist.barrier()
    return losses


def of_steps(strategy: ss.Strategy, **fields: Any) -> ss.Job:
    return job(
        model=dropping, strategy=strategy, steps=2 * len(CHAIN), optimizer=OPTIMIZERS["lamb"], clip_norm=0.5,
        **{"world_size": 4, **fields},
    )  # fmt: skip


def _straight(context: RankContext) -> list[float | None]:
    trainer = Trainer(of_steps(ss.Strategy("ring")), context, context.events.path.parent)
    losses = [trainer.take_step(step + 1) for step in range(2 * len(CHAIN))]
    trainer.strategy.close()
    return losses


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_checkpoint_resumes_under_another_expert_degree(pool: RankPool, tmp_path: Path) -> None:
    resumed = mean_losses(
        [(each, {}) for each in pool.run(partial(_through_degrees, str(tmp_path)), tmp_path)]
    )
    straight = mean_losses([(each, {}) for each in pool.run(_straight, tmp_path)])
    assert resumed == pytest.approx(straight, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt-nano"}, "model='gpt-nano' has no experts to distribute over strategy.expert=2 ranks"),
        ({"model": "moe-nano", "strategy": mesh(expert=3), "world_size": 3}, "does not divide the 8 experts"),
        ({"model": "moe-nano", "world_size": 3}, "strategy.expert=2 does not divide the 3 data ranks"),
        (
            {"model": "moe-nano", "strategy": mesh(ss.Zero2(replicas=2))},
            "strategy.data.replicas=2 is not available with strategy.expert=2 yet; leave replicas out",
        ),
        ({"model": "moe-nano", "compression": "topk"}, "compression='topk' is not available with"),
    ],
)
def test_what_is_not_available_is_refused_by_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job_of(**{"batch": 12, **fields})


@pytest.mark.parametrize(
    ("zero", "tensor", "label"),
    [(0, 1, "ring+expert2"), (3, 1, "zero-3+expert2"), (1, 2, "zero-1+tensor2+expert2")],
)
def test_a_layout_with_an_expert_degree_is_a_job_and_comes_back(zero: int, tensor: int, label: str) -> None:
    layout = ss.Layout(data=4, tensor=tensor, expert=2, zero=zero, global_batch=16, micro_batch=2)
    job = ss.Job(model="moe-nano", data="python-source", layout=layout)
    assert (job.world_size, job.strategy.label) == (4 * tensor, label)
    back = job.layout()
    assert (back.data, back.tensor, back.expert, back.zero) == (4, tensor, 2, zero)
