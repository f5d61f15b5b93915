"""What compressing is worth for a job: measured codecs, counted bytes, and what is refused."""

from __future__ import annotations

import math
import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.calibration.host_calibration import chosen
from shardscope.measure.compression import codecs, curve
from shardscope.measure.compression.codecs import packing_seconds
from shardscope.measure.compression.curve import MARGIN, MeasuredStep, PredictedStep, Worth
from shardscope.measure.compression.loss_increase import is_within_tolerance, loss_increase, loss_text
from shardscope.training.compression import Bucket
from shardscope_widgets import figures

JOB = ss.Job(model="mlp", data="digits", world_size=2)


@pytest.fixture(autouse=True)
def nothing_timed_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(codecs, "_timed_here", {})


def test_packing_takes_time_and_nothing_takes_none() -> None:
    none, once = packing_seconds([JOB, JOB.replace(compression="int8")], [[(256, 256)]])
    assert none == 0 < once < 1


def test_a_large_model_is_packed_in_part_and_scaled_up() -> None:
    job = JOB.replace(compression="bf16")
    (large,) = packing_seconds([job], [[(4096, 4096)] * 3], repeats=1)
    (small,) = packing_seconds([job], [[(512, 512)]], repeats=1)
    assert large > small


def test_what_was_timed_once_is_not_timed_again() -> None:
    job, buckets = JOB.replace(compression="int8"), [[(256, 256)]]
    first = packing_seconds([job], buckets)
    assert packing_seconds([job.replace(steps=7, name="other", batch=8)], buckets) == first
    assert packing_seconds([job.replace(world_size=4)], buckets) != first
    assert packing_seconds([job], [[(256, 255)]]) != first


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
    packing_seconds([job], buckets, repeats=1)
    assert packed == buckets
    codecs.forget_timings()
    monkeypatch.setattr(codecs, "LARGEST_SAMPLE", 1290)
    packing_seconds([job], buckets, repeats=1)
    assert packed == [[(10,)], [(128, 10)]]
    codecs.forget_timings()
    monkeypatch.setattr(codecs, "MOST_BUCKETS", 1)
    packing_seconds([job], buckets, repeats=1)
    assert packed == [[(10,)]]


@pytest.mark.slow
def test_what_the_others_take_to_answer_is_no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    job, buckets = JOB.replace(compression="int8"), [[(8,)]] * 3
    monkeypatch.setattr(codecs, "_MOMENT_S", 0.02)
    assert packing_seconds([job], buckets, repeats=5)[0] < 3 * 2 * 0.02


def test_jobs_take_turns_and_the_fastest_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def timed(job: ss.Job, _buckets: object, _others: object, steps: int) -> list[float]:
        turns.append(job.compression.name)
        return [9.0] * (steps - 3) + [3.0, 2.0 + len(turns), 4.0]

    monkeypatch.setattr(codecs, "_timed", timed)
    pair = [JOB.replace(compression=name) for name in ("int8", "bf16")]
    assert packing_seconds(pair, [[(8,)]], repeats=2) == [3.0, 3.0]
    assert turns == ["int8", "bf16", "int8", "bf16"]


def test_a_slow_timing_is_improved_when_other_jobs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    int8, bf16 = (JOB.replace(compression=name) for name in ("int8", "bf16"))
    seconds = iter([9.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(codecs, "_turn", lambda *_: [next(seconds)])
    assert packing_seconds([int8], [[(8,)]], repeats=1) == [9.0]
    assert packing_seconds([int8, bf16], [[(8,)]], repeats=2) == [3.0, 2.0]
    assert packing_seconds([int8], [[(8,)]]) == [3.0]


def test_timings_are_forgotten_when_asked_or_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 8.0, 3.0, 2.0])
    monkeypatch.setattr(codecs, "_timed", lambda *_: [next(seconds)] * 5)
    int8 = JOB.replace(compression="int8")
    time_it = lambda: packing_seconds([int8], [[(8,)]], repeats=1)
    assert [time_it(), time_it()] == [[9.0], [9.0]]
    codecs.forget_timings()
    assert time_it() == [8.0]
    later = chosen()._replace(calibration=chosen().calibration.replace(measured_at="2031-01-01 00:00"))
    monkeypatch.setattr(codecs, "chosen", lambda: later)
    assert time_it() == [3.0]
    monkeypatch.setattr(codecs, "_timed_here", {})  # as in a new process
    monkeypatch.setattr(codecs, "source_state", lambda *_: "another version")
    assert time_it() == [2.0]


def test_without_a_home_folder_packing_is_still_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SHARDSCOPE_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(codecs, "_turn", lambda *_: [2.0])
    assert packing_seconds([JOB.replace(compression="int8")], [[(8,)]], repeats=1) == [2.0]
    codecs.forget_timings()


def _one_process(number: int, barrier: Any, results: Any) -> None:
    def turn(*_: object) -> list[float]:
        time.sleep(0.01)
        return [1.0 + number]

    codecs._turn = turn  # type: ignore[assignment]
    int8 = JOB.replace(compression="int8")
    barrier.wait()
    stated = packing_seconds([int8], [[(8,)]], repeats=1)
    for seed in range(10):
        packing_seconds([int8.replace(seed=1 + seed + 10 * number)], [[(8,)]], repeats=1)
    results.put(stated)


def test_processes_that_time_packing_at_once_state_the_same_and_lose_nothing() -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    both = [context.Process(target=_one_process, args=(number, barrier, results)) for number in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    assert results.get() == results.get()
    assert len(codecs._stored()) == 1 + 2 * 10


def test_another_process_uses_the_same_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 3.0])
    monkeypatch.setattr(codecs, "_timed", lambda *_: [next(seconds)] * 5)
    int8 = JOB.replace(compression="int8")
    assert packing_seconds([int8], [[(8,)]], repeats=1) == [9.0]
    monkeypatch.setattr(codecs, "_timed_here", {})  # as in a new process
    assert packing_seconds([int8], [[(8,)]], repeats=1) == [9.0]
    codecs._path().write_text('{"damaged": [')
    monkeypatch.setattr(codecs, "_timed_here", {})
    assert packing_seconds([int8], [[(8,)]], repeats=1) == [3.0]


def test_only_one_thread_times_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most = [0], [0]

    def turn(*_: object) -> list[float]:
        busy[0] += 1
        most[0] = max(*most, *busy)
        time.sleep(0.02)
        busy[0] -= 1
        return [1.0]

    monkeypatch.setattr(codecs, "_turn", turn)
    jobs = [JOB.replace(compression="int8", seed=seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lambda job: packing_seconds([job], [[(8,)]]), jobs)] == [[1.0]] * 3
    assert most == [1]


def test_the_best_method_names_its_effect_on_the_loss() -> None:
    assert loss_text(ss.Compression("topk"), "adamw") == "loss 19% higher than uncompressed with AdamW"
    assert loss_text(ss.Compression("int4"), "adamw") == "loss 2.9% lower than uncompressed with AdamW"
    assert loss_text(ss.Compression("int8"), "adamw") == "loss unchanged with AdamW"
    assert loss_text(ss.Compression("topk"), "adamw", with_tolerance=True).endswith(
        "with AdamW (up to 3% higher is tolerated)"
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
    ("methods", "message"),
    [
        ([], r"methods=\[\] is empty or not a list; give for example methods=\['int8'\]"),
        (8, "methods=8 is empty or not a list"),
        ([8], "methods contains 8, which is not a compression method; give names such as 'int8'"),
        (["zip"], "compression='zip' is not known"),
        (["local-sgd"], "compression='local-sgd' sends different data in different steps"),
        ("adaptive-rank", "compression='adaptive-rank' sends different data in different"),
        ("adaptive-bits", "compression='adaptive-bits' sends different data in different"),
        (
            ss.Compression("dgc", warmup_steps=20),
            "compression='dgc warmup_steps=20' sends different data while it warms up, .* warmup_steps=0",
        ),
    ],
)
def test_methods_that_no_step_can_be_predicted_for_are_refused(methods: Any, message: str) -> None:
    with pytest.raises(ss.SpecError, match=message):
        ss.compression_speedup(JOB, methods=methods)


@pytest.fixture
def codec_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """What packing is said to take alone on a core, instead of measuring it."""
    monkeypatch.setattr(
        codecs, "packing_seconds", lambda jobs, _buckets: [0.01 * job.compression.is_on for job in jobs]
    )
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
    assert slow.verdict.startswith("On a link of 1 Mbit/s, 1 ms, a step takes ")
    assert not ss.runs(all=True)
    frame = slow.to_frame().set_index("method")
    assert list(frame.columns)[:2] == ["step_s", "compute_s"]
    assert (
        frame.loc["topk", "loss"]
        == "loss 19% higher than uncompressed with AdamW (up to 3% higher is tolerated)"
    )
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
    assert "the uncompressed step of " in quick.verdict
    assert re.search(r"int8 would be [\d.]+( times|%) slower\.", quick.verdict)
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


LINK = ss.Link(bandwidth="8 Mbit/s", latency="1 ms")


def made(method: str, sent: float, rest_s: float, *, rate: float = 1e6) -> PredictedStep:
    return PredictedStep(ss.Compression(method), sent, rest_s, 0.0, sent / rate)


@pytest.fixture
def whole() -> Worth:
    """On 8 Mbit/s, 1 MB takes 1 s: 1.1 s uncompressed, 0.25 s with int4, and less with topk, whose loss suffers."""
    return Worth(LINK, (made("none", 1e6, 0.1), made("int4", 1e5, 0.15), made("topk", 1e4, 0.1)))


def test_a_gain_within_the_error_of_predictions_is_said_to_be_one() -> None:
    found = Worth(LINK, (made("none", 1e2, 0.1), made("int4", 1e1, 0.095)))
    assert not found.pays
    assert found.verdict == (
        "On a link of 8 Mbit/s, 1 ms, a step takes 95 ms with int4 instead of 100 ms: 5% faster, which is below the "
        "prediction error (15%); its loss is 2.9% lower than uncompressed with AdamW (up to 1% higher is tolerated)."
    )


@given(
    *[st.floats(1, 1e9)] * 2, *[st.floats(1e-6, 10)] * 2, st.sampled_from([1.0, MARGIN]), st.floats(0.5, 1)
)
def test_a_step_gains_below_the_bandwidth_found_and_not_above_it(
    sent: float, packed: float, rest_s: float, packed_rest_s: float, margin: float, efficiency: float
) -> None:
    steps = [
        made(name, size, rest, rate=1e6 * efficiency)
        for name, size, rest in (("none", sent, rest_s), ("int4", packed, packed_rest_s))
    ]
    found = Worth(LINK, tuple(steps), efficiency=efficiency)
    level = found.pays_below(found.steps[1], margin=margin)
    gains = lambda bandwidth: found.at(bandwidth).speedup(found.at(bandwidth).steps[1])
    if 1e-2 < level < 1e12:
        assert gains(level) == pytest.approx(margin)
        assert gains(level / 2) >= margin * (1 - 1e-9)
        assert gains(2 * level) <= margin * (1 + 1e-9)
    elif level == math.inf:
        assert gains(1e12) >= margin * (1 - 1e-6)
    elif level == 0:
        above = found.pays_above(found.steps[1], margin=margin)
        if above == math.inf:
            assert max(map(gains, (1e-2, 1e6, 1e12))) <= margin * (1 + 1e-6)
        elif 1e-2 < above < 1e12:
            assert gains(above) == pytest.approx(margin)
            assert gains(above / 2) <= margin * (1 + 1e-9)
            assert gains(2 * above) >= margin * (1 - 1e-9)


def test_fewer_messages_pay_off_above_a_bandwidth(whole: Worth) -> None:
    """More bytes than uncompressed, but a shorter rest, as for a gather on a link with a long latency."""
    found = replace(whole, steps=(made("none", 1e6, 0.3), made("int8", 2e6, 0.04)))
    assert found.pays_below(found.steps[1]) == 0
    level = found.pays_above(found.steps[1])
    assert found.at(level).speedup(found.at(level).steps[1]) == pytest.approx(MARGIN)
    assert found.limit == "Compression pays off above 40.9 Mbit/s (int8)."
    assert curve.below_text(0, level) == "above 40.9 Mbit/s"
    assert "int8, above 40.9 Mbit/s" in [line.name for line in figures.compression_speedup(found).data]
    both = replace(found, steps=(*found.steps, made("int4", 1e5, 0.35)))
    assert both.limit == "Compression pays off below 69.1 Mbit/s (int4) and above 40.9 Mbit/s (int8)."
    assert replace(found, own_rate=1e6).pays_above(found.steps[1]) == math.inf


def test_another_bandwidth_changes_only_the_time_of_the_bytes(whole: Worth) -> None:
    faster = whole.at("80 Mbit/s")
    assert faster.where == "a link of 80 Mbit/s, 1 ms"
    assert [one.step_s for one in faster.steps] == pytest.approx([0.2, 0.16, 0.101])


def test_no_link_is_faster_than_the_machines_own(whole: Worth) -> None:
    limited = replace(whole, own_rate=1e7)
    assert limited.at("800 Mbit/s").steps == limited.at("80 Mbit/s").steps
    assert limited.pays_below(whole.steps[1]) == math.inf
    assert limited.limit == "Compression pays off on any link (int4)."


@pytest.mark.usefixtures("codec_s")
def test_the_machines_own_link_is_a_point_on_the_same_curve() -> None:
    own = ss.compression_speedup(JOB, methods="int8")
    linked = ss.compression_speedup(JOB, methods="int8", link=ss.Link(bandwidth="10 Mbit/s", latency=0))
    assert own.where.startswith("the machine's own link (")
    assert own.threshold is not None
    assert linked.threshold is not None
    assert own.threshold[1:] == pytest.approx(linked.threshold[1:])
    assert own.at("10 Mbit/s").plain.step_s == pytest.approx(linked.plain.step_s)


def test_only_a_method_whose_loss_is_within_its_tolerance_is_recommended(whole: Worth) -> None:
    assert whole.best.compression.name == "topk"
    assert whole.recommended.compression.name == "int4"
    assert "a step takes 250 ms with int4 instead of 1.1 s: 4.4 times faster" in whole.verdict
    assert (
        "topk would be 10 times faster, but its loss is 19% higher than uncompressed with AdamW (up to 3% higher is "
        "tolerated)."
    ) in whole.verdict


def test_the_limit_is_said_in_a_sentence(whole: Worth) -> None:
    assert whole.limit == (
        "Compression pays off below 97.7 Mbit/s (int4). Between 97.7 and 144 Mbit/s, any gain is below the prediction "
        "error (15%)."
    )
    lossy = replace(whole, steps=(whole.steps[0], whole.steps[2]))
    assert (
        lossy.limit
        == "On no link does compression pay off with a method whose loss stays within its tolerance."
    )
    mild = replace(whole, steps=(*whole.steps[:2], made("int8", 2e5, 0.01)))
    assert mild.limit == "Compression pays off on any link (int8)."
    hardly = replace(whole, steps=(whole.steps[0], made("int8", 9.5e5, 0.1)))
    assert hardly.limit == "Any gain from compression (int8) is below the prediction error (15%)."
    little = replace(whole, steps=(whole.steps[0], made("int8", 9.5e5, 0.11)))
    assert little.limit == (
        "Any gain from compression (int8, on links below 40 Mbit/s) is below the prediction error (15%)."
    )
    above = replace(whole, steps=(*whole.steps[:2], made("bf16", 9.5e5, 0.1)))
    assert above.limit == (
        "Compression pays off below 97.7 Mbit/s (int4). Above, any gain is below the prediction error (15%)."
    )


def test_a_measured_step_is_held_against_the_uncompressed_one_on_its_link(whole: Worth) -> None:
    none, int4 = ss.Compression("none"), ss.Compression("int4")
    ran = (
        MeasuredStep(int4, 1.25e7, 0.169),
        MeasuredStep(none, 1.25e7, 0.148),
        MeasuredStep(int4, 1.25e6, 0.5),
    )
    found = replace(whole, measured=ran)
    assert found.found == (
        "Measured on 100 Mbit/s: 148 ms uncompressed (predicted: 180 ms) and 169 ms with int4 (14% slower; predicted: "
        "158 ms). Measured on 10 Mbit/s: 500 ms with int4 (predicted: 230 ms)."
    )
    assert found.found in repr(found)


@pytest.mark.usefixtures("codec_s")
def test_runs_of_the_job_are_marked_and_runs_of_other_jobs_are_not() -> None:
    def ran(job: ss.Job, step_s: float, **about: Any) -> Any:
        known = SimpleNamespace(step_time_s=step_s)
        return SimpleNamespace(
            **{"id": "r", "job": job, "cluster": None, "state": "completed", "stored_summary": known, **about}
        )

    slow, other = JOB.replace(link=SLOW), ss.Link(bandwidth="10 Mbit/s", latency="2 ms")
    runs = [
        ran(slow.replace(steps=7, compression="int8"), 0.2),
        ran(slow.replace(compression="int8"), 0.3),  # older
        *(ran(slow, 0.7, state=state) for state in ("running", "stopped", "failed")),
        ran(slow, 0.5),
        ran(slow.replace(link=ss.Link(bandwidth="1 Gbit/s", latency="1 ms")), 0.1),
        ran(slow.replace(link=other), 0.6),
        ran(slow.replace(batch=8), 0.6),
        ran(JOB, 0.6),
    ]
    found = ss.compression_speedup(slow, methods="int8", runs=runs).measured
    assert [(each.compression.name, 8e-6 * each.bandwidth, each.step_s) for each in found] == [
        ("int8", 10, 0.2), ("none", 10, 0.5), ("none", 1000, 0.1),
    ]  # fmt: skip


@pytest.mark.usefixtures("codec_s")
def test_on_an_emulated_cluster_the_curve_is_that_of_predict_at_any_bandwidth() -> None:
    def cluster(bandwidth: str) -> Any:
        return ss.Cluster.emulated(nodes=2, bandwidth=bandwidth, latency="1 ms", flops="5 GFLOP/s")

    found = ss.compression_speedup(JOB, cluster("20 Mbit/s"), methods="int8")
    for bandwidth in ("5 Mbit/s", "20 Mbit/s", "200 Mbit/s"):
        predicted = ss.predict(JOB, cluster(bandwidth)).step_time_s
        assert found.at(bandwidth).plain.step_s == pytest.approx(predicted, rel=1e-6)
    uneven = ss.Cluster.emulated(nodes=2, node_bandwidth={0: "1 Mbit/s"})
    with pytest.raises(ss.SpecError, match="cannot be predicted on 2 emulated nodes.*equal links"):
        ss.compression_speedup(JOB, uneven)


@pytest.mark.usefixtures("codec_s")
def test_the_jobs_own_method_is_on_the_curve() -> None:
    found = ss.compression_speedup(JOB.replace(compression="natural"), methods="int8")
    assert [step.compression.name for step in found.steps] == ["none", "int8", "natural"]


def test_a_notebook_shows_the_sentences_and_the_curve(whole: Worth, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    whole._ipython_display_()
    said, figure = shown
    assert whole.limit in said.data
    assert figure.data[0].name == "uncompressed"


def test_thresholds_have_words() -> None:
    assert [curve.below_text(level) for level in (0, 1e6, math.inf)] == [
        "never",
        "below 8 Mbit/s",
        "on any link",
    ]
