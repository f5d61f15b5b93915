"""Simulated times against the closed forms, where these are exact."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.analytic.communication import collective_time
from shardscope.analytic.schedules import Transfers, build
from shardscope.analytic.schedules.transfers import add_schedule
from shardscope.simulator.graph import Graph
from shardscope.spec.layout import schedule_names
from shardscope.spec.pipeline_schedule import PipelineSchedule

LINK = {"bandwidth": 12.5e9, "latency": 5e-6}
INSIDE = {"per_node": 4, "inner_bandwidth": 1e11, "inner_latency": 1e-6}
COLLECTIVES = [
    *(("ring", op, workers, {}) for op in ("all_reduce", "reduce_scatter", "all_gather") for workers in (2, 7, 64)),
    *(("tree", "all_reduce", workers, {}) for workers in (2, 8, 13, 64)),
    *(("pairwise", "all_to_all", workers, {}) for workers in (2, 8, 50)),
    ("tree", "broadcast", 8, {}),
    *(("hierarchical", "all_reduce", workers, INSIDE) for workers in (4, 16, 64)),
    *(("parameter-server", "all_reduce", workers, {}) for workers in (2, 8, 64)),
    *(("parameter-server", "all_reduce", 16, {"servers": 4, "dedicated": own}) for own in (False, True)),
]  # fmt: skip
UNTIED = ss.Model.transformer(
    layers=48, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=64, seq=2048, tied=False
)
"""Embedding and output projection take almost no time, so that all stages are alike, as the closed forms assume."""
INSTANT = ss.Link(bandwidth=1e15, latency=0.0)


@pytest.mark.parametrize(("algorithm", "op", "workers", "options"), COLLECTIVES)
def test_collectives_take_the_time_of_their_formula(
    algorithm: str, op: str, workers: int, options: dict[str, object]
) -> None:
    asked = {"op": op, "algorithm": algorithm, "num_bytes": 10**9, "workers": workers, **LINK, **options}
    found = ss.simulate.collective(**asked)
    assert found.seconds == pytest.approx(float(collective_time(**asked)), rel=2e-5)


def test_segments_of_a_tree_travel_on_while_others_arrive() -> None:
    asked = {"algorithm": "tree", "num_bytes": 10**9, "workers": 16, "bandwidth": 12.5e9}
    whole, cut = (ss.simulate.collective(**asked, segments=segments).seconds for segments in (1, 16))
    assert cut < whole / 1.4


def test_a_collective_refuses_what_it_cannot_simulate() -> None:
    asked = {"num_bytes": 8, "workers": 4, "bandwidth": 1.0}
    with pytest.raises(ss.SpecError, match="algorithm='tre' is not"):
        ss.simulate.collective(algorithm="tre", **asked)
    with pytest.raises(ss.SpecError, match=r"op='all_gather'; use 'ring' for it, or .* 'all_reduce'"):
        ss.simulate.collective(algorithm="tree", op="all_gather", **asked)
    with pytest.raises(ss.SpecError, match="give per_node=8"):
        ss.simulate.collective(algorithm="hierarchical", **asked)
    with pytest.raises(ss.SpecError, match="servers"):
        ss.simulate.collective(algorithm="ring", servers=2, **asked)


@pytest.mark.parametrize("send", [0.0, 0.3])
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_has_the_timeline_of_its_table(schedule: str, send: float) -> None:
    table = build(schedule, 4, 16)
    seconds = {"F": 1.0, "B": 2.1, "I": 1.2, "W": 0.9}
    graph = Graph([f"rank {rank}" for rank in range(4)])
    entry = [graph.add(rank) for rank in range(4)]

    def message(op: object, after: list[int], target: int) -> int:
        return graph.add(target, "send", send, after=after, serial=False)

    add_schedule(
        table, entry,
        lambda op, after, _: graph.add(table.stage_ranks[op.stage], op.op, seconds[op.op], after=after), message,
    )  # fmt: skip
    costs = [seconds[op.op] for op in table.ops]
    expected = Transfers.of(table).timeline(costs, [send] * len(costs)).end
    # here links carry any number of messages, but one at a time in the timeline
    assert graph.run().total == pytest.approx(expected, rel=5e-3 if send else 1e-12)
    assert expected >= table.timeline(seconds, send=send).end * (1 - 1e-12)
    if not send:
        assert expected == pytest.approx(table.timeline(seconds).end, rel=1e-12)


@pytest.mark.parametrize("schedule", schedule_names())
def test_the_step_of_every_schedule_is_the_predicted_one(schedule: str) -> None:
    calibration = ss.Calibration.of("a100-megatron").replace(collective_s=0.0)
    cluster = ss.Cluster.of("a100-80gb", per_node=8, intra=INSTANT)
    held = PipelineSchedule.resolve(schedule).default_stages
    for micro_batches in (16, 40):
        layout = ss.Layout(pipeline=8, global_batch=micro_batches, schedule=schedule, virtual_stages=held)
        predicted = ss.predict(UNTIED, cluster, layout, calibration=calibration)
        simulated = ss.simulate(UNTIED, cluster, layout, calibration=calibration)
        assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=5e-3)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("overlap", [0.0, 0.8])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_with_zero_is_the_predicted_one_term_by_term(zero: int, overlap: float, offload: str) -> None:
    calibration = ss.Calibration.of("a100-megatron").replace(shard_overlap=overlap, gradient_overlap=0.0)
    cluster = ss.Cluster.of("a100-80gb", nodes=8)
    layout = ss.Layout(data=64, zero=zero, global_batch=256, offload=offload)
    predicted = ss.predict(UNTIED, cluster, layout, calibration=calibration)
    simulated = ss.simulate(UNTIED, cluster, layout, calibration=calibration)
    assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=1e-9)
    names = {term.name for term in predicted.time.parts}
    rounding = 1e-9 * simulated.step_time_s
    assert names == {term.name for term in simulated.time.parts if term.value > rounding}
    for name in names:
        assert simulated.time[name].value == pytest.approx(predicted.time[name].value, rel=1e-6)


def test_gradients_that_the_last_backward_pass_hides_cost_at_most_a_bucket_more() -> None:
    calibration = ss.Calibration.of("a100-megatron").replace(gradient_overlap=0.5)
    cluster = ss.Cluster.of("a100-80gb", nodes=8)
    layout = ss.Layout(data=64, zero=1, global_batch=256)
    predicted = ss.predict(UNTIED, cluster, layout, calibration=calibration)
    simulated = ss.simulate(UNTIED, cluster, layout, calibration=calibration)
    assert 1.0 <= simulated.step_time_s / predicted.step_time_s < 1.001


@pytest.mark.parametrize("strategy", ["ring", "ring:2", "zero-1", "hierarchical", "all-reduce"])
def test_a_step_of_a_job_is_the_predicted_one(strategy: str) -> None:
    job = ss.Job(model="gpt-nano", data="python-source", strategy=strategy, world_size=4, batch=16)
    assert ss.simulate(job).step_time_s == pytest.approx(ss.predict(job).step_time_s, rel=1e-3)


def test_messages_between_unequal_stages_of_a_pipeline_hide_behind_the_slowest_stage() -> None:
    job = ss.Job(model="gpt-nano", data="python-source", strategy="pipeline", world_size=4, batch=16)
    predicted, simulated = ss.predict(job).time, ss.simulate(job).step_time_s
    assert predicted is not None
    assert predicted.value - predicted["communication"].value < simulated < predicted.value


@pytest.mark.parametrize("stragglers", [{}, {3: 4.0}])
@pytest.mark.parametrize(
    "strategy", [ss.ParameterServer(mode="async"), ss.ParameterServer(mode="async", servers=2)]
)
def test_the_mean_staleness_is_the_number_of_other_workers(
    strategy: ss.ParameterServer, stragglers: dict[int, float]
) -> None:
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=6, batch=60)
    found = ss.simulate.asynchronous(job, steps=400, stragglers=stragglers)
    assert found.predicted_staleness == 5.0
    assert found.mean_staleness == pytest.approx(5.0, rel=0.02)
    assert found.staleness.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "slowdown", [{3: 2.0}, {3: 8.0}, {0: 4.0}, {1: 3.0, 3: 6.0}, {0: 2.0, 1: 3.0, 2: 4.0}]
)
@pytest.mark.parametrize("dedicated", [False, True])
def test_asynchronous_workers_compute_at_the_speeds_of_their_own_nodes(
    slowdown: dict[int, float], dedicated: bool
) -> None:
    cluster = ss.Cluster.emulated(nodes=4, flops="2 MFLOP/s", slowdown=slowdown)
    strategy = ss.ParameterServer(mode="async", dedicated=dedicated)
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=4, batch=48)
    predicted, found = ss.predict(job, cluster), ss.simulate.asynchronous(job, cluster)
    gradient = 48 / job.num_data_ranks
    assert found.updates_per_s == pytest.approx(predicted.samples_per_s / gradient, rel=0.03)
    assert predicted.step_time_s == pytest.approx(48 / predicted.samples_per_s)
    assert predicted.run_time_s == pytest.approx(job.steps * predicted.step_time_s)


@pytest.mark.parametrize(
    ("mode", "instead"), [("async", "ss.simulate.asynchronous"), ("ssp", "samples_per_s")]
)
def test_a_step_of_asynchronous_workers_is_refused_and_what_answers_instead_named(
    mode: str, instead: str
) -> None:
    job = ss.Job(model="mlp", data="digits", strategy=f"parameter-server:{mode}", world_size=4, batch=48)
    with pytest.raises(ss.SpecError, match=f"no step that all ranks take together; use .*{instead}"):
        ss.simulate(job)


def most_updates_per_s(
    computing_s: float, *, workers: int, num_bytes: float, bandwidth: float, update_s: float
) -> float:
    """Return the largest possible number of updates per second of W asynchronous workers and one dedicated server.

    It is the smaller of W / (computing + 2 S/B + update), the rate at which W workers go round if none waits for
    another, and the inverse of the time for which one update occupies the busiest part: the server's link in one
    direction, or the server itself (asymptotic bounds of operational analysis, Denning and Buzen 1978, section 6).
    """
    alone = computing_s + 2 * num_bytes / bandwidth + update_s
    return min(workers / alone, 1.0 / max(num_bytes / bandwidth, update_s))


@pytest.mark.parametrize(("bandwidth", "least", "most"), [("100 GB/s", 0.95, 1.0), ("20 Mbit/s", 0.49, 0.51)])
def test_the_rate_of_updates_follows_its_bound(bandwidth: str, least: float, most: float) -> None:
    """Workers that keep in step push, then pull: over a slow link they reach half of the bound."""
    job = ss.Job(
        model="mlp",
        data="digits",
        strategy=ss.ParameterServer(mode="async", dedicated=True),
        world_size=9,
        batch=64,
    )
    cluster = ss.Cluster.of("a100-80gb", per_node=9, intra=ss.Link.of(bandwidth, latency_s=0.0))
    calibration = ss.Calibration.of("a100-megatron").replace(collective_s=0.0, intra_efficiency=1.0)
    found = ss.simulate.asynchronous(job, cluster, calibration=calibration, jitter=0.0)
    time = ss.predict(job, cluster, calibration=calibration).time
    bound = most_updates_per_s(
        sum(time[name].value for name in ("data", "forward", "backward", "idle")), workers=8, num_bytes=43402 * 4,
        update_s=time["optimizer"].value, bandwidth=cluster.intra.bandwidth,
    )  # fmt: skip
    assert least * bound < found.updates_per_s <= most * bound
