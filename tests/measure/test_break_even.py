"""What compressing is worth for a job: measured codecs, counted bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardscope as ss
from shardscope.measure import codecs, compression_speedup
from shardscope.measure.break_even import gradient_shapes
from shardscope.measure.codecs import codec_seconds
from shardscope.measure.loss_increase import is_within_tolerance, loss_increase, loss_text
from shardscope.measure.messages import message_seconds
from shardscope.measure.probe import Probed, probed
from shardscope.spec.models import MODELS
from shardscope.training.compression import Bucket

JOB = ss.Job(model="mlp", data="digits", world_size=2)


def test_shapes_are_those_of_the_models_own_parameters() -> None:
    shapes = gradient_shapes(JOB)
    elements = [1 for _ in range(len(shapes))]
    for index, shape in enumerate(shapes):
        for size in shape:
            elements[index] *= size
    assert sum(elements) == MODELS["mlp"].num_params


def test_packing_takes_time_and_nothing_takes_none() -> None:
    buckets = [[(256, 256)]]
    assert codec_seconds(JOB, buckets) == 0
    once = codec_seconds(JOB.replace(compression="int8"), buckets, repeats=3)
    assert 0 < once < 1


def test_a_large_model_is_packed_in_part_and_scaled_up() -> None:
    large, small = [[(4096, 4096)] * 3], [[(512, 512)]]
    whole = codec_seconds(JOB.replace(compression="bf16"), large, repeats=1)
    assert whole > codec_seconds(JOB.replace(compression="bf16"), small, repeats=1)


def test_packing_goes_bucket_by_bucket_as_far_as_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[list[tuple[int, ...]]] = []

    class Watched:
        def begin_step(self, step: int) -> None:
            packed.clear()

        def mean_(self, bucket: Bucket, _: object) -> None:
            assert bucket.flat.dtype == torch.float64
            packed.append([tuple(shape) for shape in bucket.shapes])

    monkeypatch.setattr(codecs, "build_compressor", lambda _: Watched())
    job = JOB.replace(compression="int8", precision="fp64")
    buckets = [[(10,)], [(128, 10), (128,)], [(7,)]]
    codec_seconds(job, buckets, repeats=1)
    assert packed == buckets
    monkeypatch.setattr(codecs, "LARGEST_SAMPLE", 1290)
    codec_seconds(job, buckets, repeats=1)
    assert packed == [[(10,)], [(128, 10)]]
    monkeypatch.setattr(codecs, "MOST_BUCKETS", 1)
    codec_seconds(job, buckets, repeats=1)
    assert packed == [[(10,)]]


def test_what_the_others_take_to_answer_is_no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    job, buckets = JOB.replace(compression="int8"), [[(8,)]] * 3
    monkeypatch.setattr(codecs, "_MOMENT_S", 0.02)
    assert codec_seconds(job, buckets, repeats=5) < 3 * 2 * 0.02


def test_break_even_has_a_row_a_method_and_workers_and_names_the_best_way() -> None:
    found = ss.break_even(
        JOB, methods=["bf16", ss.Compression("topk", ratio=0.05)], workers=(2, 4), repeats=1
    )
    frame = found.to_frame()
    assert list(frame["method"].unique()) == ["bf16", "topk ratio=0.05"]
    assert list(frame["workers"]) == [2, 4, 2, 4]
    slow = found.best(4, "8 kbit/s")
    assert slow.compression.name == "topk"
    assert slow.speedup > 2
    assert found.best(4, 1e30) == (ss.Compression("none"), 1.0, "loss unchanged")


def test_packing_is_timed_for_the_fewest_and_the_most_workers_and_lies_on_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 is summed packed, so it is timed once; int8 takes 1 ms per worker."""
    timed: list[tuple[str, int]] = []

    def packing_times(jobs: Any, _: object, repeats: int) -> list[codecs.PackingTime]:
        assert repeats == 5
        timed.extend((job.compression.name, count) for job, count in jobs)
        return [codecs.PackingTime(1e-3 * count, 2e-3 * count) for _, count in jobs]

    monkeypatch.setattr(codecs, "packing_times", packing_times)
    found = ss.break_even(JOB.replace(world_size=4), methods=["bf16", "int8"], workers=(2, 4, 8))
    assert timed == [("bf16", 2), ("int8", 2), ("int8", 8)]
    frame = found.to_frame()
    assert list(frame["codec_s"]) == pytest.approx([2e-3] * 3 + [2e-3, 4e-3, 8e-3])
    assert (found.own_workers, found.variation) == (4, 2.0)
    bf16 = found.methods[0]
    assert all(low < high for low, high in zip(bf16.low_bandwidths, bf16.bandwidths, strict=True))


def test_jobs_take_turns_and_the_fastest_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def timed(job: ss.Job, _buckets: object, _others: object, steps: int) -> list[float]:
        turns.append(job.compression.name)
        return [9.0] * (steps - 3) + [3.0, 2.0 + len(turns), 4.0]

    monkeypatch.setattr(codecs, "_timed", timed)
    pair = [(JOB.replace(compression=name), 2) for name in ("int8", "bf16")]
    first, second = codecs.packing_times(pair, [[(8,)]], repeats=2)
    assert turns == ["int8", "bf16", "int8", "bf16"]
    assert (first.fastest_s, first.median_s, second.fastest_s) == (3.0, 3.5, 3.0)


def test_the_best_method_names_its_effect_on_the_loss() -> None:
    assert loss_text(ss.Compression("topk"), "adamw") == "loss 19% higher with AdamW"
    assert loss_text(ss.Compression("int4"), "adamw") == "loss 2.9% lower with AdamW"
    assert loss_text(ss.Compression("int8"), "adamw") == "loss unchanged with AdamW"
    assert loss_text(ss.Compression("topk"), "adamw", with_tolerance=True).endswith(
        "with AdamW, tolerance 3%"
    )
    assert loss_text(ss.Compression("randomk"), "nesterov") == "diverges with Nesterov"
    assert loss_text(ss.Compression("topk", ratio=0.3), "sgd") == "loss not measured with SGD"
    assert loss_text(ss.Compression("int8"), "adafactor") == "loss not measured with adafactor"
    assert [is_within_tolerance(ss.Compression(name), "adamw") for name in ("none", "int4", "topk", "dgc")] == [
        True, True, False, False,
    ]  # fmt: skip
    table = loss_increase()
    assert table.loc["int8", "LAMB"] == -0.4
    assert list(table.columns) == ["SGD", "Nesterov", "LARS", "AdamW", "LAMB", "tolerance"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": (1, 2)}, "workers=1 is not valid: it should be an integer of 2 or more"),
        ({"workers": []}, r"workers=\[\] is empty or not a list; give for example workers=\[4\]"),
        ({"workers": (2, 2.5)}, "workers=2.5 is not valid: it should be an integer of 2 or more"),
        ({"workers": "4"}, "workers='4' is empty or not a list"),
        ({"repeats": 0}, "repeats=0 is not valid: it should be an integer of 1 or more"),
        ({"methods": []}, r"methods=\[\] is empty or not a list; give for example methods=\['int8'\]"),
        ({"methods": 8}, "methods=8 is empty or not a list"),
        (
            {"methods": [8]},
            "methods contains 8, which is not a compression method; give names such as 'int8'",
        ),
        ({"latency_s": "1"}, "latency_s='1' has no unit; write '5 us' or '1.5 ms'"),
        ({"latency_s": -1}, "latency_s=-1 is not valid: it should be finite, and 0 or more"),
        ({"latency_s": None}, "latency_s=None is not a quantity"),
        ({"methods": ["zip"]}, "compression='zip' is not known"),
        ({"methods": ["local-sgd"]}, "compression='local-sgd' sends different data in different steps"),
        ({"methods": "adaptive-rank"}, "compression='adaptive-rank' sends different data in different"),
        ({"methods": "adaptive-bits"}, "compression='adaptive-bits' sends different data in different"),
        (
            {"methods": ss.Compression("dgc", warmup_steps=20)},
            "compression='dgc warmup_steps=20' sends different data while it warms up, .* warmup_steps=0",
        ),
    ],
)
def test_what_cannot_be_looked_at_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ss.SpecError, match=message):
        ss.break_even(JOB, **change)


def test_dgc_that_does_not_warm_up_sends_the_same_at_every_step() -> None:
    found = ss.break_even(JOB, methods=ss.Compression("dgc", momentum=0.0), workers=2, repeats=1)
    assert 0 < found.methods[0].exchanges[0].sent_bytes < 0.02 * found.plain[0].sent_bytes


def test_break_even_cuts_the_jobs_own_buckets() -> None:
    """Each costs its messages: those of three buckets are thrice those of one."""
    rounds = {}
    for size in (0.02, 25.0):
        job = JOB.replace(strategy=ss.AllReduce(bucket_mb=size))
        found = ss.break_even(job, methods=["int8", "bf16"], workers=4, repeats=1)
        rounds[size] = [found.plain[0].rounds, *(method.exchanges[0].rounds for method in found.methods)]
    assert rounds[25.0] == [6, 2, 6]
    assert rounds[0.02] == [18, 6, 18]


def test_one_may_be_given_for_several_and_quantities_with_their_units() -> None:
    found = ss.break_even(JOB, methods="int8", workers=4, latency_s="1 ms", repeats=1)
    assert (found.workers, found.latency_s) == ((4,), 1e-3)
    assert [method.compression.name for method in found.methods] == ["int8"]
    assert found.best(4, "1 kbit/s") == found.best(4, 125)
    for bandwidth, message in [
        ("1 G", "could mean bits or bytes"),
        (0, "bandwidth=0 is not valid: it should be greater than 0"),
    ]:
        with pytest.raises(ss.SpecError, match=message):
            found.best(4, bandwidth)


def test_a_job_whose_batch_two_ranks_cannot_share_is_looked_at_all_the_same() -> None:
    job = ss.Job(model="mlp", data="digits", world_size=3, batch=ss.Batch(global_batch=9, micro_batch=3))
    assert ss.break_even(job, methods="bf16", workers=3, repeats=1).workers == (3,)


@pytest.fixture
def message_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """What a message is said to cost in software, instead of measuring it."""
    monkeypatch.setattr("shardscope.measure.compression_speedup.message_seconds", lambda _job, _link: 1e-3)
    return 1e-3


class Probe:
    """A run as `compression_speedup` sees it, whose ranks wrote down so many steps."""

    id, is_alive, cluster = "there", False, None

    def __init__(self, job: ss.Job, steps: int, **fields: object) -> None:
        self.job = job.replace(steps=steps)
        self.__dict__.update(fields)

    def events(self, _kind: str | None = None) -> list[dict]:
        spans = [["compute", "forward", 0.0, 1.0, 0], ["communication", "all_reduce", 1.0, 3.0, 8]]
        traffic = {"all_reduce": {"sent_bytes": 100, "received_bytes": 100}}
        return [
            {
                "event": "step",
                "rank": rank,
                "step": 1 + step,
                "spans": spans,
                "traffic": traffic,
                "step_time_s": 3.0,
            }
            for step in range(self.job.steps)
            for rank in range(self.job.world_size)
        ]


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (Probe(JOB.replace(batch=32), 8), "probe='there' ran with batch=.*32.*, but the job has .*64"),
        (Probe(JOB.replace(optimizer="lamb"), 8), "probe='there' ran with optimizer="),
        (
            Probe(JOB.replace(compression="int8"), 8),
            "probe='there' ran with compression='int8'; pass an uncompressed",
        ),
        (
            Probe(JOB.replace(link=ss.Link(bandwidth="1 Gbit/s", latency_s=0)), 8),
            r"probe='there' ran on an emulated link \(1 Gbit/s, 0 s\); pass an uncompressed run with link=None",
        ),
        (
            Probe(JOB, 2),
            "probe='there' has no spans of all ranks after its 2 warm-up steps; pass a longer run",
        ),
        (Probe(JOB, 8, is_alive=True), "probe='there' is still running; wait for it"),
    ],
)
def test_a_probe_that_tells_nothing_of_this_job_is_refused(probe: Probe, message: str) -> None:
    with pytest.raises(ss.SpecError, match=message):
        ss.compression_speedup(JOB, methods="int8", probe=probe)  # type: ignore[arg-type]


@pytest.mark.usefixtures("message_s")
def test_a_probe_may_differ_in_what_takes_no_time() -> None:
    probe = Probe(JOB.replace(name="other", lr_schedule="cosine", steps=50), 3)
    job = JOB.replace(compression="int8", link=ss.Link(bandwidth="1 Gbit/s", latency_s=0))
    found = ss.compression_speedup(job, methods="bf16", link="10GbE", probe=probe)  # type: ignore[arg-type]
    assert found.plain.compute_s == 1.0
    assert found.link == f"a link of {ss.Link.of('10GbE').label}"


def test_software_costs_something_a_message_and_a_byte(message_s: float) -> None:
    """The probe sends 100 bytes in 2 s; of what that takes, its three buckets' six messages are a part."""
    job = JOB.replace(strategy=ss.Ring(bucket_mb=0.02))
    probe: Any = Probe(job, 8)
    byte_s = (2.0 - 6 * message_s) / 100
    for method, rounds in (("none", 6), ("int8", 6), ("powersgd", 12)):
        paced = ss.compression_speedup(job, methods=method, link="10GbE", probe=probe).steps[-1]
        assert paced.software_s == pytest.approx(rounds * message_s + paced.sent_bytes * byte_s)
        assert paced.step_s == pytest.approx(1.0 + paced.codec_s + paced.wire_s + paced.software_s)
        own = ss.compression_speedup(job, methods=method, probe=probe).steps[-1]
        assert (own.wire_s, own.software_s) == pytest.approx((own.sent_bytes * byte_s, rounds * message_s))


@pytest.mark.slow
def test_what_a_message_costs_is_measured_on_real_ranks() -> None:
    cost = message_seconds(JOB, ss.Link(bandwidth="1 Mbit/s", latency="2 ms"))
    (run,) = ss.runs(all=True)
    assert (run.name, run.job.world_size, run.state) == ("messages", 2, "completed")
    starts, ends = ([[span[at] for span in event["spans"] if span[0] == "communication"]
                     for event in run.events("step") if event["step"] == 20] for at in (2, 3))  # fmt: skip
    for bucket in range(3):  # each of the two rounds takes the latency at least, which is no cost of software
        took = max(rank[bucket] for rank in ends) - max(rank[bucket] for rank in starts)
        assert took >= 2 * 2e-3
    assert 0 < cost < 0.1


def test_computing_is_what_is_left_of_a_step_without_waiting() -> None:
    """Messages from 1 to 4 and 5 to 8; until 2, and from 6 to 7, the backward pass and another go on beside them."""

    class Overlapped(Probe):
        def events(self, _kind: str | None = None) -> list[dict]:
            lanes = [("compute", 0, 2), ("communication", 1, 4), ("communication", 5, 8), ("compute", 6, 7)]
            spans = [[lane, "any", float(start), float(end), 0] for lane, start, end in lanes]
            traffic = {"all_reduce": {"sent_bytes": 100, "received_bytes": 100}}
            row = {"event": "step", "spans": spans, "traffic": traffic, "step_time_s": 10.0}
            return [{"step": step, "rank": rank, **row} for step in (1, 2, 3) for rank in range(2)]

    probe: Any = Overlapped(JOB, 3)
    assert probed(JOB, probe) == (10.0 - (4 - 2) - (8 - 5 - 1), 100, 6.0)


@pytest.mark.sampled
@pytest.mark.usefixtures("message_s")
@pytest.mark.parametrize(
    ("strategy", "world_size", "precision"),
    [(ss.Ring, 2, "fp32"), (ss.Ring, 3, "fp32"), (ss.AllReduce, 2, "fp64")],
)
@pytest.mark.parametrize("method", ["none", "int8", "topk", "powersgd"])
def test_what_is_foretold_of_many_buckets_is_what_they_send(
    strategy: type[ss.Ring], world_size: int, precision: str, method: str
) -> None:
    """To the byte, and message by message: those of a link without end take nothing but their latency."""
    job = JOB.replace(strategy=strategy(bucket_mb=0.02), world_size=world_size, batch=12, precision=precision)
    link = ss.Link(bandwidth="1e9 Gbit/s", latency_s=1.0)
    found = ss.compression_speedup(job, methods=method, link=link, probe=Probe(job, 8))  # type: ignore[arg-type]
    run = ss.launch(job.replace(compression=method, steps=3)).wait(60)
    last = [event["traffic"] for event in run.events("step") if event["step"] == 3]
    assert found.steps[-1].sent_bytes == max(
        sum(row["sent_bytes"] for row in ranks.values()) for ranks in last
    )
    ring = 2 * (world_size - 1)
    calls = {name: row["calls"] for name, row in last[0].items()}
    rounds = sum(count * (1 if name.startswith("packet") else ring) for name, count in calls.items())
    assert sum(calls.values()) > 2
    assert found.steps[-1].wire_s == pytest.approx(rounds, rel=1e-4)


def test_a_probe_of_a_long_schedule_is_its_own_job() -> None:
    from shardscope.measure.probe import PROBE_STEPS, plain_job

    job = JOB.replace(steps=100, lr_schedule=ss.LRSchedule("linear", warmup_steps=20))
    assert plain_job(job).steps == PROBE_STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, r"methods=\[\] is empty or not a list"),
        ({"link": "1 Gbit/s"}, "link='1 Gbit/s' is a bandwidth, which needs a latency"),
        ({"link": "carrier pigeon"}, "link='carrier pigeon' is not known"),
        ({"link": 1e9}, "link=1000000000.0 is not a link; give for example Link"),
    ],
)
def test_what_worth_cannot_look_at_is_refused_before_anything_runs(change: dict, message: str) -> None:
    with pytest.raises(ss.SpecError, match=message):
        ss.compression_speedup(JOB, **change)
    assert not ss.runs(all=True)


def test_a_verdict_is_said_before_anything_compressed_has_run() -> None:
    slow = ss.compression_speedup(
        JOB, methods=["int8", "topk"], link=ss.Link(bandwidth="1 Mbit/s", latency="1 ms")
    )
    assert slow.best.compression.is_on
    assert slow.verdict.startswith("On a link of 1 Mbit/s, 1 ms, compression pays off: with ")
    assert len(ss.runs(all=True)) == 2  # the probe, and the one that tells what a message costs
    assert list(slow.to_frame().columns)[:2] == ["method", "step_s"]


def test_the_same_measurements_say_that_it_does_not_pay_on_a_quick_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of some milliseconds are measured too coarsely for this to be left to the machine."""
    num_bytes = 4.0 * MODELS["mlp"].num_params
    monkeypatch.setattr(compression_speedup, "probe_of", lambda job: None)
    monkeypatch.setattr(compression_speedup, "probed", lambda job, run: Probed(0.005, num_bytes, 0.0008))
    monkeypatch.setattr(compression_speedup, "message_seconds", lambda job, link: 0.0003)
    monkeypatch.setattr(
        compression_speedup, "codec_seconds", lambda job, buckets: 0.0005 * job.compression.is_on
    )
    slow, quick = (
        ss.compression_speedup(JOB, methods=["int8"], link=ss.Link(bandwidth=bandwidth, latency=0.0))
        for bandwidth in ("1 Mbit/s", "1000 Gbit/s")
    )
    assert slow.pays
    assert not quick.pays
    assert quick.plain.step_s == pytest.approx(0.0058, rel=1e-3)
    assert "does not pay off: the uncompressed step of 5.8 ms is the fastest" in quick.verdict


def test_only_rings_and_all_reduces_of_several_ranks_are_predicted() -> None:
    with pytest.raises(
        ss.SpecError,
        match="the effect of compression cannot be predicted for strategy='zero-3' with world_size=2",
    ):
        ss.compression_speedup(JOB.replace(strategy="zero-3"))


def test_a_gain_within_the_error_of_predictions_is_no_reason_to_compress() -> None:
    from shardscope.measure.compression_speedup import PredictedStep, Worth

    plain = PredictedStep(ss.Compression("none"), 100.0, 0.1, 0.0, 0.0, 0.0)
    packed = PredictedStep(ss.Compression("int4"), 10.0, 0.09, 0.003, 0.0, 0.002)
    found = Worth("a link", (plain, packed))
    assert not found.pays
    assert found.verdict == (
        "On a link, compression does not pay off: int4 would be 5% faster, less than the prediction error."
    )
