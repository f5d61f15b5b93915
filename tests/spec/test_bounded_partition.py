"""Stages cut by time under a memory bound, against trying every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

import shardscope as ss
from shardscope.analytic.schedules import build
from shardscope.errors import SpecError
from shardscope.spec.bounded_partition import MemoryBound, bounded_split
from shardscope.spec.partition import optimal_split


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(end - start for start, end in pairwise((0, *ends, num_layers)))
        for ends in combinations(range(1, num_layers), num_stages - 1)
    ]


class Uneven:
    """A model of uneven layers on unlike devices, with bounds that some cuts meet."""

    def __init__(self, seed: int, *, schedule: str = "1f1b", virtual_stages: int = 1) -> None:
        source = Random(seed)
        self.num_ranks = source.choice([2, 3, 4] if virtual_stages == 1 else [2, 3])
        table = build(schedule, self.num_ranks, 2 * self.num_ranks, virtual_stages)
        self.ranks = table.stage_ranks
        num_layers = len(self.ranks) + source.randint(2, 6)
        self.times = [source.lognormvariate(0, 1) for _ in range(num_layers)]
        self.slowness = [source.choice([1.0, 1.0, 1.5, 3.0]) for _ in range(self.num_ranks)]
        self.bound = MemoryBound(
            [source.choice([1.0, 1.0, 0.6]) for _ in range(self.num_ranks)], self.ranks, table.held_together(),
            [source.lognormvariate(0, 1) for _ in range(num_layers)],
            [source.lognormvariate(-1, 1) for _ in range(num_layers)],
        )  # fmt: skip
        self.cuts = every_cut(num_layers, len(self.ranks))
        tightness = source.uniform(0.02, 0.5)
        least = sorted(self.over(split) for split in self.cuts)[int(tightness * len(self.cuts))]
        self.bound = self.bound.times(least)

    def over(self, split: tuple[int, ...]) -> float:
        """The largest ratio of a rank's need to its bound, by a plain count."""
        own: list[list[tuple[float, float]]] = [[] for _ in range(self.num_ranks)]
        start = 0
        for rank, size in zip(self.ranks, split, strict=True):
            end = start + size
            own[rank].append((sum(self.bound.states[start:end]), sum(self.bound.saved[start:end])))
            start = end
        needs = [
            max(
                sum(states + count * saved for count, (states, saved) in zip(moment, mine, strict=True))
                for moment in moments
            )
            for moments, mine in zip(self.bound.in_flight, own, strict=True)
        ]
        return max(need / most for need, most in zip(needs, self.bound.rank_bytes, strict=True))

    @property
    def by_stage(self) -> list[float]:
        return [self.slowness[rank] for rank in self.ranks]

    def slowest(self, split: tuple[int, ...]) -> float:
        rest = iter(self.times)
        parts = [sum(next(rest) for _ in range(size)) for size in split]
        return max(slow * part for slow, part in zip(self.by_stage, parts, strict=True))

    def best(self) -> float:
        return min(self.slowest(split) for split in self.cuts if self.over(split) <= 1 + 1e-9)

    def found(self) -> tuple[int, ...]:
        return bounded_split(self.times, self.bound, slowness=self.by_stage)


@pytest.mark.parametrize("seed", range(12))
def test_the_cut_is_as_fast_as_the_best_of_all_that_fit(seed: int) -> None:
    case = Uneven(seed)
    split = case.found()
    assert case.over(split) <= 1 + 1e-9
    assert case.slowest(split) == pytest.approx(case.best(), rel=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "dualpipev"])
@pytest.mark.parametrize("seed", range(4))
def test_stages_of_one_rank_share_its_memory(seed: int, schedule: str) -> None:
    case = Uneven(seed, schedule=schedule, virtual_stages=2)
    split = case.found()
    assert case.over(split) <= 1 + 1e-9
    assert case.slowest(split) == pytest.approx(case.best(), rel=1e-9)


def test_the_bound_changes_cuts() -> None:
    """The cases above would prove little if the fastest cut always fitted."""
    cases = [Uneven(seed) for seed in range(12)]
    free = [
        optimal_split(case.times, case.num_ranks, slowness=case.by_stage)
        for case in cases
    ]  # fmt: skip
    assert sum(case.over(split) > 1 for case, split in zip(cases, free, strict=True)) >= 6


def test_a_bound_that_is_never_reached_changes_nothing() -> None:
    for seed in range(12):
        case = Uneven(seed)
        case.bound = case.bound.times(1e6)
        assert case.found() == optimal_split(case.times, case.num_ranks, slowness=case.by_stage)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_what_ranks_hold_together_makes_their_peak_activations(schedule: str) -> None:
    from shardscope.spec.pipeline_schedule import PipelineSchedule

    table = build(schedule, 4, 8, PipelineSchedule(schedule).default_stages)
    sizes = [Random(stage).uniform(0, 9) for stage in range(table.num_stages)]
    own = [
        [size for size, at in zip(sizes, table.stage_ranks, strict=True) if at == rank] for rank in range(4)
    ]
    peaks = [
        max(sum(count * size for count, size in zip(moment, mine, strict=True)) for moment in moments)
        for moments, mine in zip(table.held_together(), own, strict=True)
    ]
    assert peaks == pytest.approx(table.peak_activation(stage_sizes=sizes))


def test_a_bound_that_nothing_meets_is_refused_with_the_stage_and_what_would_do() -> None:
    alone = [[(1,)], [(1,)], [(1,)]]
    bound = MemoryBound([5e6, 2e6, 5e6], [0, 1, 2], alone, states=[4e6, 3e6, 3e6, 4e6], saved=[0.0] * 4)
    with pytest.raises(
        SpecError, match="stage 1 has 2 MB on rank 1, and a single layer needs more"
    ) as refused:
        bounded_split([1.0] * 4, bound)
    factor = float(str(refused.value).split("; use ")[1].split(" times")[0])
    assert bound.times(factor).fits(bounded_split([1.0] * 4, bound.times(factor)))
    with pytest.raises(SpecError):
        bounded_split([1.0] * 4, bound.times(0.98 * factor))
    with pytest.raises(SpecError, match="stage 2 has 3 MB on rank 2, .* the remaining layers need more"):
        bounded_split(
            [1.0] * 4, MemoryBound([7e6, 3e6, 3e6], [0, 1, 2], alone, [4e6, 3e6, 3e6, 4e6], [0.0] * 4)
        )


def of_two(strategy: ss.Strategy, ranks: int = 2) -> ss.Job:
    return ss.Job(model="gpt-mini", data="python-source", strategy=strategy, world_size=ranks, batch=16)


def test_a_bound_needs_a_split_by_time_and_a_number_for_each_rank() -> None:
    with pytest.raises(SpecError, match="memory_bound has no effect on split='even'"):
        ss.Pipeline(split="even", memory_bound="1 MB")
    with pytest.raises(SpecError, match="memory_bound has 2 numbers for world_size=4"):
        ss.Job(
            model="gpt-mini",
            data="python-source",
            strategy=ss.Pipeline(memory_bound=("1 MB", 2e6)),
            world_size=4,
        )
    job = ss.Job(
        model="gpt-mini",
        data="python-source",
        strategy=ss.Pipeline(memory_bound=("90 MB", 2e7)),
        world_size=2,
    )
    assert ss.Job.from_json(job.to_json()) == job
    assert job.strategy.memory_bound == (9e7, 2e7)


def test_predicted_ranks_stay_within_the_bound() -> None:
    cluster = ss.Cluster.emulated(nodes=2, flops="1 GFLOP/s", memory_bandwidth="1 GB/s", slowdown={1: 3.0})
    free = of_two(ss.Pipeline(split="speed"))
    before = ss.predict(free, cluster)
    held = held_bytes(before)
    bound = 0.8 * max(held)
    assert min(held) < bound
    after = ss.predict(free.replace(strategy=free.strategy.replace(memory_bound=bound)), cluster)
    assert max(held_bytes(after)) <= bound
    assert after.step_time_s > before.step_time_s
    refused = ss.predict(free.replace(strategy=free.strategy.replace(memory_bound="10 kB")), cluster)
    with pytest.raises(SpecError, match="no partition of the .* layers fits memory_bound: stage 0"):
        held_bytes(refused)


def held_bytes(prediction: ss.JobPrediction) -> list[float]:
    """Bytes of what the bound counts, and of what the last rank holds of the loss."""
    states, saved = prediction.states, prediction.kinds["activations"]
    assert states is not None
    return [
        float(each)
        for each in states.parameters + states.gradients + states.optimizer + saved
    ]  # fmt: skip
