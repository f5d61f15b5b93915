"""The command line's options for the fields of jobs and layouts."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import Any, Literal

import pytest

import shardscope as ss
from shardscope import cli
from shardscope.commands._fields import add_field, flag_of, given_fields, parts_of
from shardscope.commands._job import build_job
from shardscope.spec import Job, registry
from shardscope.spec._base import Spec
from shardscope.spec.compression import compression_names
from shardscope.spec.layout_optimizer import optimizer_names


class Settings(Spec):
    """A spec to make options of."""

    plain: int = 3
    """Number of things, 100 % of them. It has a second sentence."""
    on_off: bool = False
    """Whether ``it`` is done; None leaves it."""
    maybe: float | None = None
    kind: Literal["soft", "hard"] = "soft"
    """CPU or not."""


def parser_of(spec: type[Spec]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in spec.model_fields:
        add_field(parser, spec, name)
    return parser


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ([], {}),
        (["--plain", "0", "--maybe", "1e-3"], {"plain": 0, "maybe": 1e-3}),
        (["--on-off", "--kind", "hard"], {"on_off": True, "kind": "hard"}),
        (["--no-on-off"], {"on_off": False}),
        (["--kind", "other"], {"kind": "other"}),  # which the spec refuses
    ],
)
def test_what_is_given_is_read_by_the_types_of_the_fields(options: list[str], fields: dict[str, Any]) -> None:
    assert given_fields(parser_of(Settings).parse_args(options), Settings) == fields


def test_help_is_the_first_sentence_of_a_docstring_and_the_default() -> None:
    text = " ".join(parser_of(Settings).format_help().split())
    for said in (
        "--plain PLAIN number of things, 100 % of them (default: 3)",
        "--on-off, --no-on-off whether it is done; leaving it out leaves it",
        "--kind {soft,hard} CPU or not (default: soft)",
    ):
        assert said in text
    assert "second sentence" not in text


@pytest.mark.parametrize(
    ("command", "lists"),
    [
        (
            "run",
            [registry.names(kind) for kind in (ss.Compression, ss.LRSchedule, ss.Optimizer, ss.Strategy)],
        ),
        (
            "tune",
            [registry.names(kind) for kind in (ss.Compression, ss.LRSchedule, ss.Optimizer, ss.Strategy)],
        ),
        ("predict", [compression_names(), optimizer_names()]),
        ("plan", [optimizer_names()]),
    ],
)
def test_help_names_every_method_that_can_be_given(
    command: str, lists: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    text = re.sub(r"-\n *", "-", capsys.readouterr().out)  # lines also end at hyphens
    for names in lists:
        assert ", ".join(names) in " ".join(text.split())


def test_commands_start_without_torch() -> None:
    script = "import sys; from shardscope import cli; cli.build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_field_of_a_job_has_an_option() -> None:
    given = vars(cli.build_parser().parse_args(["run"]))
    parts = dict(parts_of(Job))
    fields = {name for name in Job.model_fields if name not in parts and name != "link"}
    inner = {f"{name}.{field}" for name, part in parts.items() for field in part.model_fields}
    assert set(parts) == {"batch", "checkpoint", "record"}
    assert fields | inner | {"link_bandwidth", "link_latency"} <= given.keys()


def test_options_reach_the_fields_of_parts_and_leave_the_rest_of_a_file(tmp_path: Any) -> None:
    def job(*options: str) -> ss.Job:
        return build_job(cli.build_parser().parse_args(["run", *options]))

    first = job(
        *("--model", "mlp", "--clip-norm", "0.5", "--eval-every", "10", "--checkpoint-every", "5", "--loss", "mse"),
        *("--record-noise-scale", "--record-noise-every", "2", "--until", "20", "--threads", "2", "--timeout-s", "9"),
    )  # fmt: skip
    assert (first.clip_norm, first.eval_every, first.loss, first.until) == (0.5, 10, "mse", 20)
    assert first.checkpoint == ss.Checkpoint(every=5)
    assert (first.record.noise_scale, first.record.noise_every) == (True, 2)
    assert (first.threads, first.timeout_s) == (2, 9)
    path = tmp_path / "job.json"
    path.write_text(first.to_json())
    again = job("--job", str(path), "--checkpoint-at-end", "--global-batch", "32")
    assert again.checkpoint == ss.Checkpoint(every=5, at_end=True)
    assert again.replace(checkpoint=first.checkpoint, batch=first.batch) == first


def test_a_layout_takes_every_option_of_predict_and_the_aliases_of_its_precision() -> None:
    given = vars(cli.build_parser().parse_args(["predict", "gpt2", "a100-80gb"]))
    assert ss.Layout.model_fields.keys() <= given.keys()
    options = ["--precision", "bf16", "--no-flash-attention", "--sequence-parallel", "--tensor", "2"]
    arguments = cli.build_parser().parse_args(["predict", "gpt2", "a100-80gb", *options])
    layout = ss.Layout(**given_fields(arguments, ss.Layout))
    assert layout == ss.Layout(tensor=2, sequence_parallel=True, flash_attention=False)


def test_a_name_that_a_layout_does_not_know_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--precision", "bf17"], ["--recompute", "some"], ["--schedule", "2f2b"]):
        assert cli.main(["predict", "gpt2", "a100-80gb", *option]) == 2
        error = capsys.readouterr().err
        assert error.startswith("shardscope: ")
        assert error.count("\n") == 1


def test_what_a_resumed_study_cannot_take_up_is_called_by_its_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in (
        ["--ranks", "3"],
        ["--batch", "8"],
        ["--checkpoint-every", "2"],
        ["--optimizer-set", "beta1=0"],
    ):
        assert cli.main(["tune", "--resume", "nothing", *option]) == 2
        assert f"{option[0]} applies only to a new study" in capsys.readouterr().err


def test_an_option_is_called_as_its_field() -> None:
    assert (flag_of("lr_schedule"), flag_of("checkpoint.at_end")) == ("--lr-schedule", "--checkpoint-at-end")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--recovery", "5", "--recovery-set", "replica_every=1"], "recovery", ss.Recovery(5, replica_every=1)),
        (["--recovery-set", "replica_every=2"], "recovery", ss.Recovery(replica_every=2)),
        (
            ["--elastic", "2:4", "--ranks", "2", "--elastic-set", "batch=scaled"],
            "elastic", ss.Elastic(least=2, most=4, batch="scaled"),
        ),
        (
            ["--data", "corpus", "--data-set", "cache=2 GB", "--data-set", "window=4"],
            "data", ss.Shards("corpus", cache="2 GB", window=4),
        ),
    ],
)  # fmt: skip
def test_settings_of_parts_have_an_option(options: list[str], field: str, value: Any) -> None:
    parsed = cli.build_parser().parse_args(["run", *options])
    assert getattr(build_job(parsed), field) == value


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--data", "digits", "--data-set", "cache=1 GB"], "no effect, because --data is 'digits'; give the path of"),
        (["--elastic-set", "batch=scaled"], "because --elastic is not given; give a range of ranks"),
        (["--recovery", "none", "--recovery-set", "replica_every=1"], "because --recovery is"),
        (["--recovery-set", "copies=1"], "Recovery field"),
        (["--data", "corpus", "--data-set", "cache=20"], "cache='20' has no unit; write '80 GiB' or '80 GB'"),
        (["--data", "corpus", "--data-set", "path=other"], "-set 'path=other' names the data; use --data other"),
        (["--elastic", "2:4", "--elastic-set", "most=8"], "is an end of the range of ranks; use --elastic, such as"),
        (["--recovery", "2", "--recovery-set", "restarts=5"], "is the number of restarts; use --recovery 5"),
        (["--recovery-set", "replica_every"], "--recovery-set 'replica_every' is not NAME=VALUE; write for example"),
    ],
)  # fmt: skip
def test_settings_of_parts_that_are_not_there_are_refused(options: list[str], told: str) -> None:
    parsed = cli.build_parser().parse_args(["run", *options])
    with pytest.raises(ss.SpecError, match=re.escape(told)):
        build_job(parsed)
