"""Logs of torchtitan: versions, validation, ranks out of order, restarts."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.trainer_logs import row

import shardscope as ss
from shardscope.errors import DataError, SpecError
from shardscope.measure.calibrate.tables import Given, read_rows
from shardscope.spec.model import Transformer

pytestmark = pytest.mark.timeout(60)


def titan(number: int, tps: int, *, version: str = "0.3") -> str:
    head = f"2026-01-02 03:04:05,678 - root - INFO - step: {number:2}  loss:  7.1234  "
    return {
        "0.0": f"{head}memory: 37.01GiB(38.9%)  wps: {tps:,}  mfu: 38.10%",
        "0.1": f"{head}memory: 37.01GiB(38.9%)  tps: {tps:,}  mfu: 38.10%",
        "0.2": f"[titan] {head}memory: 37.01GiB(38.9%)  tps: {tps:,}  tflops: 312.10  mfu: 38.10%",
        "0.3": f"[titan] {head}grad_norm:  1.5  memory: 37.01GiB(38.9%)  tps: {tps:,}  tflops: 312.10  mfu: 38.10%",
    }[version] + "\n"


def validation(number: int, tps: int) -> str:
    return f"[titan] - root - INFO - validate step: {number:2}  loss:  7.0  memory: 37.01GiB(38.9%)  tps: {tps:,}\n"


def tps(text: str) -> float:
    found: float = row(text)["tokens_per_s_per_device"]
    return found


@pytest.mark.parametrize("version", ["0.0", "0.1", "0.2", "0.3"])
def test_the_lines_of_each_version_of_torchtitan_are_read(version: str) -> None:
    text = "".join(titan(n, 600 * n, version=version) for n in (1, 10, 20, 30, 40))
    assert tps(text) == 18000
    coloured = (
        text.replace("step:", "\x1b[36mstep:").replace("loss", "\x1b[32mloss").replace("mfu", "\x1b[35mmfu")
    )
    assert tps(coloured) == tps(coloured.replace("\x1b", "")) == 18000


@pytest.mark.parametrize(
    "word",
    ["validate", "validation", "Validate", "eval", "val", "Validation on c4:", "eval (c4)", "val/c4", "held-out", "dev",
     "[VALIDATION] epoch 0", "[VALIDATION]", "dev -", "average over 9 batches,"],
)  # fmt: skip
def test_lines_of_validation_are_not_steps(word: str) -> None:
    lines = [titan(1, 900), titan(10, 6000), titan(20, 7000)]
    for n in range(30, 100, 10):
        lines += [titan(n, 7000), validation(n, 15000).replace("validate", word)]
    assert tps("".join(lines)) == 7000
    with pytest.raises(DataError, match="has no step of Megatron"):
        tps("".join(validation(n, 15000).replace("validate", word) for n in range(9)))


@given(st.integers(2, 9), st.integers(4, 30), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_ranks_that_write_one_file_are_one_run_in_whatever_order(
    ranks: int, logged: int, lag: int, draw: random.Random
) -> None:
    """Each rank writes its steps in order; a rank may fall behind the others by up to `lag` logged steps."""
    due = [1] * ranks
    lines = []
    while any(each <= logged for each in due):
        slowest = min(due)
        rank = draw.choice([n for n, each in enumerate(due) if each <= logged and each - slowest <= lag])
        lines.append(titan(10 * due[rank], 100 if due[rank] <= 2 else 5000 + 100 * (due[rank] % 7)))
        due[rank] += 1
    one = "".join(titan(10 * n, 100 if n <= 2 else 5000 + 100 * (n % 7)) for n in range(1, logged + 1))
    if (
        logged > lag + 1
    ):  # or else a rank may finish before another begins, as a run that is started again does
        assert tps("".join(lines)) == tps(one)
    labelled = "".join(f"{n % ranks}: {line}" for line in one.splitlines(keepends=True) for n in range(ranks))
    assert tps(labelled) == tps(one)


def start(number: int, batch: int = 64) -> str:
    return (
        f"[titan] - root - INFO - Trainer is initialized with local batch size 8, global batch size {batch}, gradient "
        f"accumulation steps 1, sequence length 8192, total steps 1000 (warmup 200)\n"
        f"[titan] - root - INFO - Training starts at step {number}\n"
    )


def _titans(first: int, last: int, fast: int, slow: Sequence[int] = (90, 80)) -> str:
    rates = [*slow, *[fast] * last]
    return "".join(titan(n, rate) for n, rate in zip(range(first, last + 1, 10), rates, strict=False))


@pytest.mark.parametrize("first", [10, 30, 50, 60])
def test_a_job_of_torchtitan_that_resumes_from_a_checkpoint_is_one_run(first: int) -> None:
    text = start(1) + _titans(10, 50, 7000) + start(first - 9 + 1) + _titans(first, 200, 7100)
    assert tps(text) == 7100
    assert (
        tps(text + start(first - 9 + 1) + _titans(first, 200, 7100)) == 7100
    )  # from the same checkpoint again
    twice = "".join(f"[rank{n}]:{line}\n" for line in text.splitlines() for n in (0, 1))
    assert tps(twice) == 7100
    found = row(text)
    assert (found["global_batch"], found["seq"]) == (64, 8192)


def test_several_runs_of_torchtitan_in_a_file_are_refused() -> None:
    run = start(1) + _titans(10, 90, 7000)
    with pytest.raises(DataError, match="goes back from step 90 to 10, so it has several runs"):
        tps(run + run)
    with pytest.raises(
        DataError, match="with a global batch of 64 of 8192 tokens and a global batch of 32 of 8192"
    ):
        tps(run + start(41, batch=32) + _titans(50, 90, 7000))
    with pytest.raises(DataError, match="goes back from step 90 to 50"):
        tps(_titans(10, 90, 7000) + _titans(50, 90, 7000))


def test_a_line_of_torchtitan_that_is_cut_in_its_rate_does_not_count() -> None:
    text = "".join(titan(n, 7000) for n in range(10, 60, 10))
    last = titan(60, 17123)
    for end in range(len(last)):
        assert tps(text + last[:end]) == 7000
        assert tps(text + last[:end] + "\n") == 7000
        assert tps(text + last[:end] + titan(70, 7000)) == 7000


def test_the_batch_that_torchtitan_states_is_the_row_s(tmp_path: Path) -> None:
    path = tmp_path / "titan.log"
    path.write_text(start(1) + _titans(10, 90, 7000))
    layout = ss.Layout(data=32, zero=3, global_batch=512)
    model = ss.Model.of("llama-2-13b")
    assert isinstance(model, Transformer)
    (found,) = read_rows(path, Given(ss.Cluster.of("h100", nodes=4), model, layout))
    assert (found.layout.global_batch, found.model.seq) == (64, 8192)
    assert found.seconds == pytest.approx(64 * 8192 / (7000 * 32))


@pytest.mark.parametrize(
    "prefix",
    ["", "  ", "2026-01-02 03:04:05,678 ", "INFO: ", "INFO:root:", "[rank0]: ", "[rank0]:[titan] 2026 - root - INFO - ",
     "INFO     ", "2026 | INFO | train:log:88 - ", "I0102 03:04:05.678 9 train.py:88] ", "worker-1  | ",
     "2026-01-02T03:04:05Z "],
)  # fmt: skip
def test_whatever_a_logger_writes_before_a_step_is_no_label(prefix: str) -> None:
    text = "".join(prefix + titan(n, 7000).partition("INFO - ")[2] for n in range(10, 60, 10))
    assert tps(text) == 7000


def test_steps_that_are_logged_again_at_another_rate_are_refused() -> None:
    once = [titan(n, 7000) for n in range(10, 160, 10)]
    again = [titan(n, 15000).replace("INFO - ", "INFO - [c4] ") for n in range(10, 160, 10)]
    with pytest.raises(
        DataError, match="states step 30 at 7,000 and 15,000 tokens/s, so it has lines of another"
    ):
        tps("".join(line for pair in zip(once, again, strict=True) for line in pair))
    assert tps("".join(line for line in once for _ in range(2)) + again[-1]) == 7000  # one rank, once late


def test_a_batch_of_thousands_of_digits_is_refused_and_such_steps_do_not_count() -> None:
    long = "9" * 5000
    text = start(1) + _titans(10, 90, 7000)
    assert tps(text + titan(100, 7000).replace("100 ", f"{long} ")) == 7000
    assert tps(text + titan(100, 7000).replace("7,000", long)) == 7000
    with pytest.raises(SpecError, match="global batch size='9999.* is not a whole number"):
        tps(text.replace("global batch size 64", f"global batch size {long}"))


def test_thousands_in_the_stated_batch_are_read() -> None:
    text = "Trainer is initialized with local batch size 8, global batch size 1,024, sequence length 131,072, total\n"
    found = row(text + "".join(titan(n, 6000) for n in (1, 10, 20, 30)))
    assert (found["global_batch"], found["seq"]) == (1024, 131072)


def test_labelled_ranks_at_different_rates_are_of_different_runs() -> None:
    def lines(second: int) -> str:
        rates = (6000, second)
        return "".join(
            f"[rank{rank}]:" + titan(n, rates[rank]) for n in (1, 10, 20, 30, 40) for rank in (0, 1)
        )

    assert tps(lines(6100)) == 6050
    with pytest.raises(DataError, match="states step 20 at 6,000 and 12,000 tokens/s"):
        row(lines(12000))


@pytest.mark.parametrize("kind", ["log", "csv", "json"])
def test_compressed_rows_are_read_like_others(kind: str, tmp_path: Path) -> None:
    text = {
        "log": start(1) + "".join(titan(n, 6000) for n in (1, 10, 20, 30)),
        "csv": "data,tensor,global_batch,step_time_s\n2,8,64,21.5\n",
        "json": '[{"data": 2, "tensor": 8, "global_batch": 64, "step_time_s": 21.5}]',
    }[kind]
    given = Given(
        ss.Cluster.of("h100-80gb", nodes=2), Transformer.of("llama-2-13b"), ss.Layout(data=2, tensor=8)
    )
    plain, packed = tmp_path / f"mine.{kind}", tmp_path / f"mine.{kind}.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    (one,), (other,) = read_rows(plain, given), read_rows(packed, given)
    assert (one.seconds, one.layout, one.model) == (other.seconds, other.layout, other.model)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(packed, given)
