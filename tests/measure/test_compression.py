"""What compressing is worth for a job: measured codecs, counted bytes, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardscope as ss
from shardscope.measure.compression import codecs, speedup
from shardscope.measure.compression.codecs import codec_seconds
from shardscope.measure.compression.loss_increase import is_within_tolerance, loss_increase, loss_text
from shardscope.measure.compression.speedup import MARGIN, PredictedStep, Worth
from shardscope.training.compression import Bucket

JOB = ss.Job(model="mlp", data="digits", world_size=2)


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


@pytest.mark.slow
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
def codec_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """What packing is said to take alone on a core, instead of measuring it."""
    monkeypatch.setattr(speedup, "codec_seconds", lambda job, _buckets: 0.01 * job.compression.is_on)
    return 0.01


SLOW = ss.Link(bandwidth="10 Mbit/s", latency="1 ms")


@pytest.mark.parametrize("method", ["none", "int8", "topk", "powersgd"])
@pytest.mark.parametrize("link", [None, SLOW, "10GbE"])
def test_a_step_is_that_of_predict_but_for_packing(codec_s: float, method: str, link: Any) -> None:
    found = ss.compression_speedup(JOB, methods=method, link=link).steps[-1]
    predicted = ss.predict(JOB.replace(compression=method, link=link))
    parts = {part.name: part.value for part in predicted.time.parts}
    assert found.communication_s == pytest.approx(parts["communication"])
    assert found.compute_s == pytest.approx(
        predicted.step_time_s - parts["communication"] - parts.get("codec", 0)
    )
    assert found.sent_bytes == predicted.sent_bytes.max()
    assert found.codec_s >= codec_s if found.compression.is_on else found.codec_s == 0


@pytest.mark.usefixtures("codec_s")
def test_a_probe_moves_all_steps_by_how_much_slower_than_predicted_it_was() -> None:
    probe: Any = SimpleNamespace(
        id="there", cluster=None, job=JOB.replace(steps=8, name="probe", link="10GbE")
    )
    predicted_s = ss.predict(probe.job).step_time_s
    probe.summary = lambda: SimpleNamespace(step_time_s=predicted_s + 0.5)
    with_it, without = (
        ss.compression_speedup(JOB, methods="int8", link=SLOW, probe=each) for each in (probe, None)
    )
    for moved, told in zip(with_it.steps, without.steps, strict=True):
        assert moved.step_s == pytest.approx(told.step_s + 0.5)
    probe.summary = lambda: SimpleNamespace(step_time_s=None)
    with pytest.raises(ss.SpecError, match="probe='there' has no finished step; wait for it"):
        ss.compression_speedup(JOB, methods="int8", probe=probe)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 32}, "probe='there' ran with batch=.*32.*, but the uncompressed job has .*64"),
        ({"optimizer": "lamb"}, "probe='there' ran with optimizer="),
        ({"compression": "int8"}, "probe='there' ran with compression=.*; pass an uncompressed run"),
    ],
)
def test_a_probe_of_another_job_is_refused(changed: dict, message: str) -> None:
    probe: Any = SimpleNamespace(id="there", job=JOB.replace(**changed))
    with pytest.raises(ss.SpecError, match=message):
        ss.compression_speedup(JOB, methods="int8", probe=probe)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.usefixtures("codec_s")
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
    found = ss.compression_speedup(job, methods=method, link=link)
    run = ss.launch(job.replace(compression=method, steps=3)).wait(60)
    last = [event["traffic"] for event in run.events("step") if event["step"] == 3]
    assert found.steps[-1].sent_bytes == max(
        sum(row["sent_bytes"] for row in ranks.values()) for ranks in last
    )
    ring = 2 * (world_size - 1)
    calls = {name: row["calls"] for name, row in last[0].items()}
    rounds = sum(count * (1 if name.startswith("packet") else ring) for name, count in calls.items())
    assert sum(calls.values()) > 2
    assert found.steps[-1].communication_s == pytest.approx(rounds, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, r"methods=\[\] is empty or not a list"),
        ({"link": "1 Gbit/s"}, "link='1 Gbit/s' is a bandwidth, which needs a latency"),
        ({"link": "carrier pigeon"}, "link='carrier pigeon' is not known"),
        ({"link": 1e9}, "link=1000000000.0 is not valid: it should be"),
    ],
)
def test_what_worth_cannot_look_at_is_refused_before_anything_runs(change: dict, message: str) -> None:
    with pytest.raises(ss.SpecError, match=message):
        ss.compression_speedup(JOB, **change)
    assert not ss.runs(all=True)


def test_a_verdict_is_said_before_anything_has_run() -> None:
    slow = ss.compression_speedup(
        JOB, methods=["int8", "topk"], link=ss.Link(bandwidth="1 Mbit/s", latency="1 ms")
    )
    assert slow.best.compression.is_on
    assert slow.verdict.startswith("On a link of 1 Mbit/s, 1 ms, compression pays off: with ")
    assert not ss.runs(all=True)
    frame = slow.to_frame().set_index("method")
    assert list(frame.columns)[:2] == ["step_s", "compute_s"]
    assert frame.loc["topk", "loss"] == "loss 19% higher with AdamW, tolerance 3%"
    assert frame["is_harmless"].to_dict() == {"none": True, "int8": True, "topk": False}
    assert slow.losses.equals(loss_increase())


@pytest.mark.usefixtures("codec_s")
def test_it_pays_on_a_slow_link_and_not_on_a_quick_one_and_at_asks_the_same() -> None:
    slow, quick = (
        ss.compression_speedup(JOB, methods=["int8"], link=ss.Link(bandwidth=bandwidth, latency=0.0))
        for bandwidth in ("1 Mbit/s", "1000 Gbit/s")
    )
    assert slow.pays
    assert not quick.pays
    assert "does not pay off: the uncompressed step of " in quick.verdict
    for moved, told in zip(slow.at("1000 Gbit/s").steps, quick.steps, strict=True):
        assert moved.step_s == pytest.approx(told.step_s)


def test_only_rings_and_all_reduces_of_several_ranks_are_predicted() -> None:
    with pytest.raises(
        ss.SpecError,
        match="the effect of compression cannot be predicted for strategy='zero-3' with world_size=2",
    ):
        ss.compression_speedup(JOB.replace(strategy="zero-3"))


def test_steps_on_gpus_have_no_predicted_time() -> None:
    with pytest.raises(ss.SpecError, match="compute on GPUs of this machine, .*ss.predict"):
        ss.compression_speedup(JOB.replace(device="cuda"))


def test_a_gain_within_the_error_of_predictions_is_no_reason_to_compress() -> None:
    plain = PredictedStep(ss.Compression("none"), 100.0, 0.1, 0.0, 0.0)
    packed = PredictedStep(ss.Compression("int4"), 10.0, 0.09, 0.003, 0.002)
    found = Worth("a link", (plain, packed))
    assert not found.pays
    assert found.verdict == (
        "On a link, compression does not pay off: int4 would be 5% faster, less than the prediction error."
    )


def made(method: str, sent: float, rest_s: float, *, rate: float = 1e6) -> PredictedStep:
    return PredictedStep(ss.Compression(method), sent, rest_s, 0.0, sent / rate)


@pytest.fixture
def whole() -> Worth:
    """On 8 Mbit/s, 1 MB takes 1 s: 1.1 s uncompressed, 0.25 s with int4, and less with topk, whose loss suffers."""
    steps = (made("none", 1e6, 0.1), made("int4", 1e5, 0.15), made("topk", 1e4, 0.1))
    link = ss.Link(bandwidth="8 Mbit/s", latency="1 ms")
    return Worth(f"a link of {link.label}", steps, link, "adamw")


def test_at_the_bandwidth_found_the_step_is_faster_by_the_margin(whole: Worth) -> None:
    plain, int4, _ = whole.at(whole.pays_below(whole.steps[1])).steps
    assert plain.step_s / int4.step_s == pytest.approx(MARGIN)


def test_another_bandwidth_changes_only_the_time_of_the_bytes(whole: Worth) -> None:
    faster = whole.at("80 Mbit/s")
    assert faster.link == "a link of 80 Mbit/s, 1 ms"
    assert [one.step_s for one in faster.steps] == pytest.approx([0.2, 0.16, 0.101])


def test_no_link_is_faster_than_the_machines_own(whole: Worth) -> None:
    limited = replace(whole, own_rate=1e7)
    assert limited.at("800 Mbit/s").steps == limited.at("80 Mbit/s").steps
    assert limited.pays_below(whole.steps[1]) == math.inf
    assert "**" not in limited.limit
    assert limited.limit == "On any link use int4."


def test_the_machines_own_link_has_no_bandwidth_to_change(whole: Worth) -> None:
    own = Worth("the machine's own link", whole.steps)
    for ask in (lambda: own.at("1 Gbit/s"), lambda: own.pays_below(own.steps[1]), lambda: own.limit):
        with pytest.raises(ss.SpecError, match="own link does not depend on a bandwidth; pass link="):
            ask()


def test_only_a_method_whose_loss_is_within_its_tolerance_is_recommended(whole: Worth) -> None:
    assert whole.best.compression.name == "topk"
    assert whole.recommended.compression.name == "int4"
    assert "compression pays off: with int4 a step takes 250 ms instead of 1.1 s" in whole.verdict
    assert "topk would be faster" in whole.verdict
    assert "loss 19% higher with AdamW, tolerance 3%" in whole.verdict


def test_the_limit_is_said_in_a_sentence(whole: Worth) -> None:
    above = "no method whose loss stays within its tolerance gains 15%."
    assert whole.limit == f"Below 97.7 Mbit/s use int4; above it {above}"
    lossy = replace(whole, steps=(whole.steps[0], whole.steps[2]))
    assert lossy.limit == f"On no link does compression pay off: {above}"
    mild = replace(whole, steps=(*whole.steps[:2], made("int8", 2e5, 0.01)))
    assert mild.limit == "On any link use int8."
