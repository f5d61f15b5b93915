"""`ss.simulate`: what the result holds, and how it reacts to slow ranks, jitter, failures and contention."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from torch import nn

import shardscope as ss
from shardscope.simulator.breakdown import lane_spans

GPT = ss.Model.transformer(layers=8, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=32000, seq=1024)
CLUSTER = ss.Cluster.of("a100-80gb", nodes=4, per_node=4)
LAYOUT = ss.Layout(data=2, tensor=2, pipeline=4, global_batch=16, zero=1)


def job_of(**settings: object) -> ss.Job:
    usual = {"model": "gpt-nano", "data": "python-source", "strategy": "ring", "world_size": 4, "batch": 16}
    return ss.Job(**usual | settings)


def test_terms_add_up_to_the_step_on_every_kind_of_step() -> None:
    found = [
        ss.simulate(GPT, CLUSTER, LAYOUT),
        ss.simulate(GPT, CLUSTER, LAYOUT, jitter=0.1, stragglers={3: 2.0}),
        ss.simulate(GPT, CLUSTER, LAYOUT.replace(zero=3, pipeline=1, data=8)),
        *(ss.simulate(job_of(strategy=name), stragglers={1: 1.5}) for name in ("tree", "pipeline", "zero-3")),
    ]
    for each in found:
        longest = float(lane_spans(each.done).max())
        assert each.step_time_s == pytest.approx(longest, rel=1e-12)
        assert sum(part.value for part in each.time.parts) == pytest.approx(longest, rel=1e-9)
        assert 0 <= each.idle_fraction < 1


def test_terms_have_the_names_of_the_prediction() -> None:
    simulated, predicted = ss.simulate(GPT, CLUSTER, LAYOUT), ss.predict(GPT, CLUSTER, LAYOUT)
    assert {part.name for part in simulated.time.parts} <= {part.name for part in predicted.time.parts}
    job = job_of(strategy="zero-2")
    simulated_job, predicted_job = ss.simulate(job), ss.predict(job)
    assert {part.name for part in simulated_job.time.parts} == {
        part.name for part in predicted_job.time.parts
    }


def test_links_carry_the_predicted_bytes_of_a_job() -> None:
    job = job_of(strategy="zero-3")
    links = ss.simulate(job).links().set_index("link")["bytes"]
    sent = ss.predict(job).sent_bytes
    assert [links[f"rank {rank}, out"] for rank in range(4)] == sent.tolist()
    assert sum(links[f"rank {rank}, in"] for rank in range(4)) == sent.sum()


def test_ranks_send_their_packets_to_different_ranks_at_the_same_time() -> None:
    """So packets of all ranks take as long as those of one; if all began with rank 0, its link would be the limit."""
    cluster = ss.Cluster.emulated(nodes=8, bandwidth="10 Mbit/s", flops="1 GFLOP/s")
    job = job_of(model="mlp", data="digits", world_size=8, compression="int8")
    assert ss.simulate(job, cluster).step_time_s == pytest.approx(
        ss.predict(job, cluster).step_time_s, rel=1e-3
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "zbv"])
def test_steps_of_a_pipeline_follow_each_other_without_a_gap_on_the_busiest_rank(schedule: str) -> None:
    """With ZB-H2 and ZBV, that rank has no bubble, although others wait at the beginning and the end of a step."""
    strategy = ss.Pipeline(schedule=schedule, split="even")
    cluster = ss.Cluster.emulated(nodes=4, flops="1 MFLOP/s")
    job = ss.Job(model=_equal_layers, data="digits", strategy=strategy, world_size=4,
                 batch=ss.Batch(global_batch=64, micro_batch=8))  # fmt: skip
    predicted, simulated = ss.predict(job, cluster), ss.simulate(job, cluster)
    passes_s = predicted.time["forward"].value + predicted.time["backward"].value
    has_bubble = schedule in {"1f1b", "zb-h1"}
    assert (predicted.time["pipeline bubble"].value > 0.05 * passes_s) == has_bubble
    assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min"])
@pytest.mark.parametrize(("message", "within"), [(0.3, 0.03), (1.0, 0.06)])
def test_messages_of_every_schedule_are_hidden_as_predicted(
    schedule: str, message: float, within: float
) -> None:
    """The message of one micro-batch takes as long as a part of its forward pass on all stages of a rank."""
    forward_s, samples, width = 0.05, 8, 64
    flops = 2 * 2 * samples * width**2 / forward_s
    cluster = ss.Cluster.emulated(nodes=4, flops=flops, bandwidth=samples * width * 4 / (message * forward_s))
    job = ss.Job(model=_equal_layers, data="digits", strategy=ss.Pipeline(schedule=schedule, split="even"),
                 world_size=4, batch=ss.Batch(global_batch=64, micro_batch=samples))  # fmt: skip
    predicted = ss.predict(job, cluster).step_time_s
    assert predicted == pytest.approx(ss.simulate(job, cluster).step_time_s, rel=within)


def _equal_layers() -> nn.Module:
    layers = (nn.Linear(64, 64) for _ in range(7))
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 64)), *layers)


def test_a_slow_rank_slows_all_ranks_that_wait_for_it() -> None:
    plain, slow = ss.simulate(job_of()), ss.simulate(job_of(), stragglers={2: 2.0})
    computing = plain.time["forward"].value + plain.time["backward"].value + plain.time["optimizer"].value
    other = plain.time["data"].value + plain.time["fixed cost"].value
    assert slow.step_time_s == pytest.approx(plain.step_time_s + computing + other, rel=1e-9)
    lanes = slow.lanes().set_index("lane")
    assert lanes["idle_s"].idxmin() == "rank 2"
    assert lanes.loc["rank 0", "idle_s"] > lanes.loc["rank 2", "idle_s"] + 0.9 * computing


def test_replicas_wait_for_one_with_a_slow_rank() -> None:
    known = ss.Calibration.of("a100-megatron")
    plain = ss.simulate(GPT, CLUSTER, LAYOUT, calibration=known)
    slow = ss.simulate(GPT, CLUSTER, LAYOUT, calibration=known, stragglers={5: 1.5})
    assert slow.step_time_s > plain.step_time_s
    assert len(slow.done.copies) == 2
    assert {rank for ranks in slow.lane_ranks for rank in ranks} == set(range(16))
    assert slow.lanes()["computing_s"].max() > 1.4 * plain.lanes()["computing_s"].max() * 0.9


def test_jitter_is_seeded_and_costs_time() -> None:
    plain = ss.simulate(GPT, CLUSTER, LAYOUT).step_time_s
    drawn = [ss.simulate(GPT, CLUSTER, LAYOUT, jitter=0.2, seed=seed).step_time_s for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert min(drawn) > plain


def test_a_failure_costs_the_lost_part_and_the_recovery() -> None:
    plain = ss.simulate(job_of())
    failed = ss.simulate(job_of(), failures=[(plain.step_time_s / 2, 3.0), (0.0, 0.0)])
    assert failed.lost_s == pytest.approx(3.0 + plain.step_time_s / 2, rel=0.2)
    assert failed.time["failures"].value == failed.lost_s
    assert failed.step_time_s == pytest.approx(failed.lost_s + plain.step_time_s, rel=0.2)
    with pytest.raises(ss.SpecError, match="give seconds within the step"):
        ss.simulate(job_of(), failures=[(1e6, 0.0)])


def test_gathers_of_parameters_hide_behind_computation_where_a_job_overlaps() -> None:
    job = job_of(strategy="zero-3", batch=ss.Batch(32, micro_batch=4))
    assert ss.simulate(job, overlap=True).step_time_s < 0.97 * ss.simulate(job).step_time_s


def test_collectives_on_one_link_slow_each_other_down() -> None:
    """Tensor parallel messages and ZeRO's gathers share the link inside the node, which no closed form knows."""
    calibration = ss.Calibration.of("a100-megatron").replace(shard_overlap=1.0)
    layout = ss.Layout(data=4, tensor=2, zero=3, global_batch=32)
    cluster = ss.Cluster.of("a100-80gb", per_node=8, intra=ss.Link.of("20 GB/s", latency_s=0.0))
    predicted = ss.predict(GPT, cluster, layout, calibration=calibration)
    assert (
        ss.simulate(GPT, cluster, layout, calibration=calibration).step_time_s > 1.02 * predicted.step_time_s
    )


def test_the_timeline_has_the_events_of_every_rank() -> None:
    step = ss.simulate(GPT, CLUSTER, LAYOUT).timeline
    assert step.world_size == 16
    assert step.origin == "simulated"
    assert {event.rank for event in step.events} == set(range(16))
    assert {(m.rank, m.peer) for m in step.messages} >= {(0, 4), (1, 5), (4, 0)}
    job = ss.simulate(job_of()).timeline
    assert job.sent_bytes == ss.predict(job_of()).sent_bytes.tolist()
    assert max(event.end_s for event in job.events) == pytest.approx(job.step_time_s)


def test_sixteen_thousand_devices_are_simulated_and_what_was_merged_is_said() -> None:
    cluster = ss.Cluster.of("h100", nodes=2048, per_node=8)
    layout = ss.Layout(data=64, tensor=8, pipeline=32, global_batch=4096, zero=1, micro_batch=1)
    model = ss.Model.of("gpt3-175b").replace(layers=96)
    found = ss.simulate(model, cluster, layout, calibration=ss.Calibration.of("a100-megatron"))
    assert found.num_devices == 16384
    assert "All 64 replicas are one." in found.merged
    assert found.step_time_s == pytest.approx(
        ss.predict(model, cluster, layout, calibration=ss.Calibration.of("a100-megatron")).step_time_s,
        rel=0.1,
    )
    assert sum(len(ranks) for ranks in found.lane_ranks) == 16384
    with pytest.raises(ss.SpecError, match="too many to draw"):
        _ = found.timeline


def test_a_job_with_many_ranks_sends_whole_collectives() -> None:
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=512, batch=512)
    found = ss.simulate(job, ss.Cluster.of("h100", nodes=64))
    assert "All messages of a rank in a collective are one message." in found.merged
    assert found.num_devices == 512


def test_results_are_plain_values_and_text() -> None:
    found = ss.simulate(GPT, CLUSTER, LAYOUT)
    assert json.loads(json.dumps(found.to_dict()))["step_time_s"] == found.step_time_s
    assert "pipeline bubble" in repr(found)
    assert found._repr_html_().startswith("<div>")
    asynchronous = ss.simulate.asynchronous(job_of(strategy="parameter-server:async"))
    assert json.loads(json.dumps(asynchronous.to_dict()))["predicted_staleness"] == 3.0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"jitter": -1.0}, "jitter=-1.0 is not valid"),
        ({"stragglers": {4: 2.0}}, "numbered 0 to 3"),
        ({"stragglers": {0: 0.0}}, "give a positive number"),
        ({"layout": LAYOUT}, "layout has no effect on a job"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ss.SpecError, match=match):
        ss.simulate(job_of(), **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"global_batch": 2**30}, r"global_batch=1073741824 .* at most 8388608, or a larger micro_batch"),
        ({"global_batch": 2**30, "data": 2, "micro_batch": 2}, "a global_batch of at most 8388608"),
    ],
)
def test_layouts_with_too_many_micro_batches_are_refused_in_their_own_words(
    settings: dict[str, int], match: str
) -> None:
    layout = LAYOUT.replace(**{"data": 4, "pipeline": 1, "tensor": 4} | settings)
    with pytest.raises(ss.SpecError, match=match):
        ss.simulate(GPT, CLUSTER.replace(nodes=layout.num_devices // 4), layout)


def test_only_asynchronous_servers_have_a_staleness() -> None:
    with pytest.raises(ss.SpecError, match="is not asynchronous"):
        ss.simulate.asynchronous(job_of())
    with pytest.raises(ss.SpecError, match="give at least 10"):
        ss.simulate.asynchronous(job_of(strategy="parameter-server:async"), steps=3)


def test_simulating_a_layout_imports_no_torch() -> None:
    code = (
        "import sys, shardscope as ss; m = ss.Model.of('gpt3-175b'); c = ss.Cluster.of('a100-80gb', nodes=16);"
        "ss.simulate(m, c, ss.Layout(tensor=8, pipeline=16, global_batch=16)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
