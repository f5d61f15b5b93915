"""Hostile files of other programs: a sentence, in little memory and time, and no NaN."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.calibration.calibration import Calibration
from shardscope.cli import main
from shardscope.errors import ShardscopeError, SpecError
from shardscope.foreign_file import parsed_json, unpacked
from shardscope.spec.numbers import require_plausible

LINK = ss.Link(bandwidth=1e9, latency=1e-5)
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "vocab_size": 130,
}  # fmt: skip
DEEP = "[" * 200_000 + "]" * 200_000
HOSTILE = {
    "deep list": DEEP,
    "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "5,000 digits": "9" * 5000,
    "4,000 digits": "9" * 4000,
    "1e30": "1e30",
    "1e308": "1e308",
    "1e999": "1e999",
    "negative": "-1e308",
    "long text": json.dumps("x" * 100_000),
}


def computed(**changes: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0, "dur": 10, **changes}


def collective(**changes: Any) -> dict[str, Any]:
    args = {"Input Dims": [[4]], "Input type": ["float"]}
    return {"ph": "X", "name": "gloo:all_reduce", "tid": 2, "ts": 12, "dur": 9, "args": args, **changes}


def trace(*events: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"distributedInfo": about, "traceEvents": [computed(), *events]}


HERE = "HERE"
READERS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "config": ({**LLAMA, "vocab_size": HERE}, ss.Model.from_hf),
    "config layers": ({**LLAMA, "num_hidden_layers": HERE}, ss.Model.from_hf),
    "config type": ({**LLAMA, "model_type": HERE}, ss.Model.from_hf),
    "whole": (HERE, ss.Model.from_hf),
    "trace": (HERE, lambda path: ss.simulate.kineto([path], LINK)),
    "trace time": (trace(computed(ts=HERE)), lambda path: ss.simulate.kineto([path], LINK)),
    "trace duration": (trace(computed(dur=HERE)), lambda path: ss.simulate.kineto([path], LINK)),
    "trace world size": (trace(world_size=HERE), lambda path: ss.simulate.kineto([path], LINK)),
    "trace rank": (trace(rank=HERE), lambda path: ss.simulate.kineto([path], LINK)),
    "trace shape": (
        trace(collective(args={"Input Dims": [[HERE, 4]], "Input type": ["float"]})),
        lambda path: ss.simulate.kineto([path], LINK),
    ),
    "trace dtype": (
        trace(collective(args={"Input Dims": [[4]], "Input type": [HERE]})),
        lambda path: ss.simulate.kineto([path], LINK),
    ),
    "job": ({"model": "mlp", "data": "digits", "steps": HERE}, lambda path: ss.Job.from_json(path.read_text())),
    "rows": ([{"step_time_s": HERE}], lambda path: ss.calibrate(rows=str(path))),
    "calibration": ({"name": "x", "step_s": HERE, "launch_s": "1e40"}, Calibration.load),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", READERS)
def test_a_hostile_file_is_refused_in_a_sentence(tmp_path: Path, name: str, kind: str) -> None:
    content, read = READERS[name]
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content).replace(f'"{HERE}"', HOSTILE[kind]))
    started = time.process_time()
    with pytest.raises(ShardscopeError) as refused:
        read(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 1500
    assert time.process_time() - started < 5


BOMB = """
import resource, sys
from pathlib import Path
import shardscope as ss
resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))
try:
    ss.simulate.kineto([Path(sys.argv[1])], ss.Link(bandwidth=1e9, latency=1e-5))
except ss.SpecError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux does")
def test_a_compressed_file_that_grows_without_end_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b" " * (1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert "more than 100 times its compressed size" in done.stdout


def test_a_compressed_text_is_read_and_a_cut_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace(rank=0, world_size=1)).encode()))
    assert parsed_json(unpacked(path))["traceEvents"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SpecError, match="is not a Kineto trace"):
        ss.simulate.kineto([path], LINK)


def many(count: int, *, overlapping: bool) -> dict[str, Any]:
    """Operations with collectives between them, on one thread or on two, or within one that lasts throughout."""
    events = [computed(ts=20 * place, dur=15 if overlapping else 8) for place in range(count)]
    calls = [collective(ts=20 * place + 9, tid=1 if overlapping else 2) for place in range(count)]
    return {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [*events, *calls]}


@pytest.mark.slow
@pytest.mark.parametrize("overlapping", [False, True])
def test_a_trace_with_thousands_of_collectives_takes_seconds(tmp_path: Path, overlapping: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(many(8000, overlapping=overlapping)))
    started = time.process_time()
    found = ss.simulate.kineto([path], LINK)
    assert time.process_time() - started < 6  # in quadratic time 12 to 17 s
    assert found.step_time_s == pytest.approx(160e-3, rel=0.7)


LAYOUT = ss.Layout(data=4, tensor=4, global_batch=64)
CLUSTER = ss.Cluster.of("h100-80gb", nodes=2)
MODEL = ss.Model.of("llama-3-8b")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the numbers are in a value of JSON; of rows of numbers, the first ones only."""
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in places(inner, (*path, key))]
    if isinstance(value, list):
        return [each for at, inner in enumerate(value[:2]) for each in places(inner, (*path, at))]
    return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("number", [1e308, 1e-308, -1e308, 1e31, 1e29, 1e-29])
def test_a_constant_of_any_size_is_refused_or_predicts_finite_numbers(number: float) -> None:
    known = json.loads(ss.predict(MODEL, CLUSTER, LAYOUT).calibration.to_json())
    refused = 0
    for path in places(known):
        changed = json.loads(json.dumps(known))
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = number
        try:
            found = ss.predict(MODEL, CLUSTER, LAYOUT, calibration=Calibration.from_json(json.dumps(changed)))
        except SpecError:
            refused += 1
            continue
        figures = [found.step_time_s, found.peak_bytes, found.tokens_per_s, found.mfu, *found.interval]
        assert all(map(math.isfinite, figures)), (path, figures)
    assert refused


@pytest.mark.parametrize("value", [1e31, 1e-31, -1e300, {"a": {"b": [1e40]}}, (1.0, 1e-200)])
def test_a_number_that_would_overflow_is_named(value: object) -> None:
    with pytest.raises(SpecError, match="field=.* is not plausible"):
        require_plausible({"other": 1.0, "field": value})
    require_plausible({"field": (0.0, 1e30, 1e-30, -5.0), "text": "1e300", "count": 10**40})


def test_a_fraction_that_may_be_0_may_be_as_small_as_one_likes() -> None:
    for name in ("message_overlap", "gradient_overlap", "shard_overlap"):
        tiny = Calibration(name="made up", **{name: 3e-170})
        found = ss.predict(MODEL, CLUSTER, LAYOUT, calibration=tiny)
        none = ss.predict(MODEL, CLUSTER, LAYOUT, calibration=tiny.replace(**{name: 0.0}))
        assert found.step_time_s == pytest.approx(none.step_time_s)
    with pytest.raises(SpecError, match="matmul_efficiency=3e-170 is not plausible"):
        Calibration(name="made up", matmul_efficiency=3e-170)


def test_devices_and_links_have_plausible_numbers() -> None:
    with pytest.raises(SpecError, match="is not plausible"):
        ss.Link(bandwidth=1e308, latency=0.0)
    device = CLUSTER.device
    with pytest.raises(SpecError, match="memory_bandwidth=1e[+]308 is not plausible"):
        device.replace(memory_bandwidth=1e308)


def test_the_middle_of_a_long_message_is_cut_and_its_remedy_stays() -> None:
    error = SpecError(f"x={'y' * 5000} is not valid; use z")
    assert len(str(error)) == 1500
    assert str(error).startswith("x=yyy")
    assert str(error).endswith("is not valid; use z")
    assert str(SpecError("short; use z")) == "short; use z"
    remedy = "; give one of " + ", ".join(f"name-{each}" for each in range(80))
    assert str(SpecError(f"x={'y' * 5000} is not valid{remedy}")).endswith(f" ... {remedy}")
    failed = ss.RunFailed("m" * 3200, rank=1, step=2, strategy="ring", traceback="t" * 3000)
    assert len(failed.args[0]) == 1500
    assert failed.traceback in str(failed)


@pytest.mark.parametrize("text", ["9" * 5000, b"9" * 5000, '{"a": [' + "1" * 5000 + "]}"])
def test_a_number_with_thousands_of_digits_is_refused_in_words_for_users(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^it has a number with more than 4,300 digits$"):
        parsed_json(text)


NAMED: dict[str, Callable[[Any], Any]] = {
    "runs": ss.runs,
    "launch": lambda name: ss.launch(ss.Job(model="mlp", data="digits"), root=name),
    "attach": ss.Run.attach,
    "calibration": Calibration.load,
    "config": ss.Model.from_hf,
    "trace": lambda name: ss.simulate.kineto([name], LINK),
    "rows": lambda name: ss.calibrate(rows=name),
    "data": lambda name: ss.Job(model="mlp", data=name).replace(data=ss.Shards(name)).replace(data=None),
}


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "caf\udce9"], ids=["null byte", "long", "not UTF-8"])
@pytest.mark.parametrize("what", [each for each in NAMED if each not in ("runs", "launch")])
def test_a_name_that_no_file_can_have_is_refused(what: str, name: str) -> None:
    with pytest.raises(ShardscopeError) as refused:
        NAMED[what](name)
    assert len(str(refused.value)) <= 1500


@pytest.mark.parametrize("what", ["runs", "launch"])
def test_a_folder_of_runs_with_a_null_byte_is_refused(what: str) -> None:
    with pytest.raises(SpecError, match=r"root='a.*b' has a null byte"):
        NAMED[what]("a\0b")


def test_data_whose_path_is_not_utf_8_are_refused_by_the_job() -> None:
    for data in ("caf\udce9.npz", ss.Shards, ["caf\udce9"]):
        with pytest.raises(SpecError, match="is not text in UTF-8|path="):
            ss.Job(model="mlp", data=data("caf\udce9") if data is ss.Shards else data)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["9" * 20_000 + "a\nb", "1" + "_" * 20_000 + "\n", "1" + " " * 20_000 + "\n" + " " * 20_000 + "x"]
)
def test_a_long_quantity_is_refused_at_once(text: str) -> None:
    started = time.process_time()
    with pytest.raises(SpecError, match="bandwidth="):
        ss.Link(bandwidth=text, latency=0.0)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_numbers_beyond_all_bounds_are_named(value: float) -> None:
    job = ss.Job(model="mlp", data="digits", world_size=2)
    with pytest.raises(SpecError, match=r"stragglers\[0\]="):
        ss.simulate(job, stragglers={0: value})
    with pytest.raises(SpecError, match="memory_limit="):
        ss.tune(job, {"batch": [32]}, memory_limit=value)
    if isinstance(value, int):
        with pytest.raises(SpecError, match="seed="):
            ss.simulate(job, seed=-abs(value), jitter=0.1)


@pytest.mark.parametrize("covariance", [5, True, "x", {"a": [1]}, [[1], 2], None])
def test_a_covariance_that_is_not_a_matrix_is_named(covariance: Any) -> None:
    with pytest.raises(SpecError, match="covariance"):
        Calibration.from_json(json.dumps({"name": "x", "covariance": covariance}))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 50_000])
@pytest.mark.parametrize("option", ["--steps", "--ranks", "--lr", "--batch"])
def test_a_very_long_value_of_an_option_is_cut_in_its_message(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", option, f"x{value}"])
    said = capsys.readouterr().err
    assert f"invalid {'float' if option == '--lr' else 'int'} value" in said
    assert len(said) < 1700
