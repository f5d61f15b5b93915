"""The steps in logs of Megatron: ramp-ups, units, encodings, several ranks, restarts."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.measure.trainer_logs import STEPS, arguments, ms, row, step, steps

import shardscope as ss
from shardscope.errors import DataError, SpecError
from shardscope.measure.calibrate.logs import decoded
from shardscope.measure.calibrate.tables import Given, read_rows

pytestmark = pytest.mark.timeout(60)

RAMP = [*((64, 11.0) for _ in range(30)), *((128, 14.0) for _ in range(30)), (256, 21.0), (256, 22.0)]


def test_steps_of_a_ramp_up_do_not_count() -> None:
    text = arguments(rampup_batch_size="['64', '64', '1000000']")
    ramp = "".join(step(n + 1, 1e3 * s, batch) for n, (batch, s) in enumerate(RAMP))
    assert ms(text + ramp + steps([23200.0, 23100.0, 23300.0], first=63)) == 23200.0
    with pytest.raises(
        DataError, match="has 2 logged steps with a global batch of 256, and the first 2 are left"
    ):
        ms(text + ramp)
    with pytest.raises(DataError, match="has 0 logged steps with a global batch of 256"):
        ms(text + "".join(step(n + 1, 1e3, 64) for n in range(50)))


def test_a_ramp_up_whose_steps_do_not_state_their_batch_is_refused() -> None:
    times = steps([9.0] * 9, batch=None)
    assert ms(arguments() + times) == 9.0
    for name, value in [("rampup_batch_size", "['64', '64', '9']"), ("decrease_batch_size_if_needed", True)]:
        with pytest.raises(
            SpecError, match=rf"states {name}={re.escape(str(value))}, but its steps do not state"
        ):
            ms(arguments(**{name: value}) + times)


def test_without_arguments_the_steps_of_the_last_batch_count_and_are_the_row_s() -> None:
    found = row(steps([5.0] * 9, 128) + steps([7.0] * 5, 256, first=10))
    assert (found["step_time_ms"], found["global_batch"], "model" in found) == (7.0, 256, False)


def test_times_are_in_seconds_or_milliseconds() -> None:
    slow = "".join(step(n, 105.2, unit="s") for n in range(1, 6))
    assert ms(arguments() + slow) == pytest.approx(105200.0)
    stamped = "".join(f" [2026-01-02 03:04:05.6] {line}\n" for line in STEPS.splitlines())
    assert ms(arguments() + stamped) == 20000.0
    assert ms(arguments() + STEPS.replace("/     500", "/infinity")) == 20000.0


def test_a_step_that_ends_before_its_separator_does_not_count() -> None:
    assert ms(arguments() + STEPS + step(6, 19980.0)[:-200]) == pytest.approx(20000.0)
    half = step(6, 19980.0)
    merged = half[: half.index("elapsed") + 9] + step(7, 19970.0)
    assert ms(arguments() + STEPS + merged) == pytest.approx((20000.0 + 19990.0) / 2)


def test_wherever_a_log_is_cut_its_time_and_layout_are_those_of_whole_lines() -> None:
    """A log cut at any byte at its end, and at many at its start, is refused or read as what is whole in it."""
    text = arguments() + steps([900.0, 400.0, 201.5, 200.5, 199.5, 198.5, 197.5])
    whole = {key: value for key, value in row(text).items() if key != "step_time_ms"}
    times = set()
    for end in range(len(text) - 900, len(text)):
        found = row(text[:end])
        times.add(found.pop("step_time_ms"))
        assert found == whole
    assert times <= {201.5, 201.0, 200.5, 200.0, 199.5}
    for start in range(40, text.index("end of arguments"), 7):
        with pytest.raises((DataError, SpecError)):
            row(text[start:])
    for end in range(len(arguments()) - 200, 100, -97):
        with pytest.raises((DataError, SpecError), match=r"breaks off in Megatron's arguments|has no step"):
            row(text[:end] + "\n" + STEPS)


def test_arguments_without_their_frame_are_refused() -> None:
    framed = arguments() + STEPS
    for lost in ("- arguments -", "end of arguments"):
        with pytest.raises(DataError, match=r"give the whole log"):
            row("\n".join(line for line in framed.splitlines() if lost not in line) + "\n")
    bare = "\n".join(line for line in framed.splitlines() if not line.startswith("---"))
    with pytest.raises(DataError, match="without the lines 'arguments' and 'end of arguments'"):
        row(bare + "\n")


# Encodings, colours, and several ranks.


def _with_mark(text: str) -> bytes:
    return codecs.BOM_UTF16_BE + text.encode("utf-16-be")


def _labelled(text: str, label: str) -> bytes:
    """Write a label, which may contain the number of the line, before each line."""
    return "".join(f"{label.format(n)}{line}\n" for n, line in enumerate(text.splitlines())).encode()


@pytest.mark.parametrize(
    "written",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-16-be"),
        _with_mark,
        lambda text: text.encode("utf-32"),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("/data/", "/données/").encode("latin-1"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\0\n").encode(),
        lambda text: text.replace(" iteration  ", "\rloading  7%\rloading 99%\r iteration  ").encode(),
        lambda text: text.replace("elapsed", "\x1b[1;31melapsed\x1b[0m").replace(" | lr", "\x1b[K | lr").encode(),
        lambda text: _labelled(text, "[default3]:"),
        lambda text: _labelled(text, "[rank31]: "),
        lambda text: _labelled(text, "31: "),
        lambda text: _labelled(text, "[1,31]<stdout>:"),
        lambda text: _labelled(text, "[17{:08}] "),
        lambda text: _labelled(text, "12:34:{:02} "),
        lambda text: _labelled(text, "2026-01-02T03:04:{:02}Z [rank7]: "),
    ],
    ids=["utf-16", "utf-16-le", "utf-16-be", "utf-16-be marked", "utf-32", "utf-8 marked", "latin-1", "crlf", "zeros",
         "progress bars", "colours", "torchrun", "ranks", "srun", "mpirun", "seconds", "times", "times and ranks"],
)  # fmt: skip
def test_logs_are_read_in_any_encoding_colour_and_label(
    written: Callable[[str], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(written(arguments() + STEPS))
    (found,) = read_rows(path, Given(ss.Cluster.of("a100-80gb", nodes=4)))
    assert found.seconds == 20.0
    assert (found.layout.data, found.layout.tensor, found.layout.zero) == (4, 8, 1)
    assert found.model.hidden == 5120


def test_a_short_text_of_zeros_is_not_utf_16() -> None:
    assert decoded(b"a\0") == "a"
    assert decoded(b"") == ""


def test_messages_of_other_ranks_between_and_within_lines_are_left_out() -> None:
    noise = "[rank3]:[W123 ProcessGroupNCCL.cpp:1] Warning: barrier ... using device 3\n> building dataset ... done\n"
    text = (
        arguments()
        .replace("  hidden_size", noise + "  hidden_size")
        .replace("  num_layers", noise + "  num_layers")
    )
    assert ms(text + STEPS) == 20000.0
    joined = arguments().replace("\n  micro_batch_size", "  micro_batch_size")
    assert row(joined + STEPS) == row(arguments() + STEPS)
    torn = arguments(sequence_parallel="True[rank5]: warning")
    with pytest.raises(
        SpecError, match=r"sequence_parallel=True\[rank5\]: warning is neither True nor False"
    ):
        row(torn + STEPS)


def test_arguments_that_several_ranks_print_at_once_are_those_of_one() -> None:
    one, other = arguments().splitlines(), arguments(rank=1, local_rank=1).splitlines()
    mixed = [line for pair in zip(one, other, strict=False) for line in pair] + other[len(one) :]
    assert row("\n".join(mixed) + "\n" + STEPS)["step_time_ms"] == 20000.0


def test_a_restarted_job_is_one_run_and_each_start_warms_up() -> None:
    first = arguments() + steps([90.0, 40.0, 20.0, 20.0, 20.0])
    again = arguments(load="/ckpt", lr=0.0001) + steps([70.0, 60.0, 21.0, 21.0, 21.0, 21.0], first=4)
    assert ms(first + again) == 21.0
    assert ms(first + arguments() + "out of memory\n" + again) == 21.0
    with pytest.raises(DataError, match="goes back from step 5 to 4, so it has several runs"):
        ms(first + again[len(arguments(load="/ckpt", lr=0.0001)) :])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_model_parallel_size", 4),
        ("recompute_granularity", "full"),
        ("num_layers", 48),
        ("overlap_grad_reduce", True),
        ("mtp_num_layers", 1),
    ],
)
def test_several_runs_in_a_file_are_refused_by_the_argument_that_differs(name: str, value: Any) -> None:
    with pytest.raises(
        DataError, match=rf"differs between starts, with {name}=.* and {name}={value}; give one file"
    ):
        row(arguments() + STEPS + arguments(**{name: value}) + STEPS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"num_workers": 2}, {"num_workers": 8}),
        ({"profile": False}, {"profile": True, "profile_step_start": 10}),
        ({"record_memory_history": False}, {"record_memory_history": True}),
        ({"timing_log_level": 0, "log_params_norm": False}, {"timing_log_level": 2, "log_params_norm": True}),
        ({}, {"a_new_layer_of_attention": False}),
        ({}, {"a_new_degree_of_parallel": 1}),
        ({}, {"mtp_num_layers": None, "overlap_grad_reduce": False, "ds_sequence_parallel_size": 1}),
    ],
)
def test_starts_that_differ_in_what_changes_nothing_are_one_run(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    again = steps([9.0, 9.0, 20000.0, 20000.0], first=4)
    assert ms(arguments(**one) + STEPS + arguments(**other) + again) == 20000.0
    assert ms(arguments(**other) + STEPS + arguments(**one) + again) == 20000.0


LONG = "9" * 5000


@pytest.mark.parametrize("slower", [1.3, 2.0, 0.4])
def test_runs_with_the_same_arguments_at_different_speeds_are_refused(slower: float) -> None:
    again = steps([slower * each for each in (90000.0, 40000.0, 20010.0, 20000.0, 19990.0)])
    with pytest.raises(DataError, match=r"has several runs: steps from 1 take .* one file per run"):
        row(arguments() + STEPS + arguments() + again)
    later = steps([slower * 20000.0] * 5, first=5)  # a job that resumes, on other nodes
    assert ms(arguments() + STEPS + arguments() + later) > 0


@pytest.mark.parametrize("time", ["20000,0", "20.000,0", "2,00,00.0", "20,0000"])
def test_times_with_a_decimal_comma_do_not_count(time: str) -> None:
    assert ms(arguments() + STEPS.replace("20010.0", time)) == 19995
    assert ms(arguments() + STEPS.replace("20010.0", "20,010.0")) == 20000


@pytest.mark.parametrize("value", [LONG, "²", "٣", "4.0", "-1"])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("world_size", {}),
        ("hidden_size", {}),
        ("global_batch_size", {}),
        ("ffn_hidden_size", {}),
        ("num_query_groups", {"group_query_attention": True}),
        ("num_distributed_optimizer_instances", {}),
        ("tensor_model_parallel_size", {}),
        ("recompute_num_layers", {"recompute_granularity": "full", "recompute_method": "block"}),
        (
            "num_layers_per_virtual_pipeline_stage",
            {"pipeline_model_parallel_size": 2, "data_parallel_size": 2},
        ),
    ],
)
def test_what_is_no_count_is_refused_by_the_argument(name: str, more: dict[str, Any], value: str) -> None:
    with pytest.raises(SpecError, match=name) as error:
        row(arguments(**{**more, name: value}) + STEPS)
    assert len(str(error.value)) < 400


def test_steps_with_numbers_of_thousands_of_digits_do_not_count() -> None:
    head = arguments() + STEPS
    assert ms(head + step(6, 20.0).replace("       6/", f" {LONG}/")) == 20000.0
    assert ms(head + step(6, 20.0).replace("20.0 |", f"{LONG} |")) == 20000.0
    with pytest.raises(SpecError, match="global batch size='999.* is not a whole number"):
        ms(head + step(6, 20.0).replace("  256 |", f"{LONG} |"))
