"""`shardscope plan`: the table, the JSON, and what it says when it cannot."""

from __future__ import annotations

import json

import pytest

from shardscope.cli import main

SMALL = ["plan", "gpt2-xl", "a100-80gb", "--global-batch", "64", "--fix", "offload=none"]


def test_it_prints_the_ranked_table_and_why_the_second_lost(capsys):
    assert main([*SMALL, "--top", "3"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()[2:5]] == ["1", "2", "3"]
    assert "Plan 1 takes" in told
    assert "does not fit" in told or "beaten" in told
    assert "software megatron-core, calibration megatron-core on a100-80gb: " in told
    assert "software='megatron-core' is assumed by default" in told


def test_the_settings_of_a_plan_are_printed_alone(capsys):
    assert main([*SMALL, "--fix", "schedule=1f1b", "--config", "2"]) == 0
    told = capsys.readouterr()
    assert all(line.startswith("--") for line in told.out.splitlines())
    assert "--global-batch-size 64" in told.out
    assert told.err.startswith("Megatron-LM, flags of pretrain_gpt.py.")


def test_settings_and_json_exclude_each_other(capsys):
    assert main([*SMALL, "--config", "1", "--json"]) != 0
    assert "use one of them" in capsys.readouterr().err


def test_json_holds_plans_and_counts(capsys):
    assert (
        main([*SMALL, "--json", "--objective", "time=1,headroom=2", "--fix", "zero=1,2", "--top", "4"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert [plan["rank"] for plan in told["plans"]] == [1, 2, 3, 4]
    assert {plan["layout"]["zero"] for plan in told["plans"]} <= {1, 2}
    assert told["considered"] == sum(told["rejected"].values()) + told["kept"]


def test_nothing_that_fits_ends_with_one_and_says_what_would(capsys):
    assert main(["plan", "gpt3-175b", "a100-80gb", "--fix", "offload=none"]) == 1
    assert "the closest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["gpt9000", "a100-80gb"], "gpt9000"),
        (["gpt2-xl", "a200"], "a200"),
        (["gpt2-xl", "a100-80gb", "--nodes", "0"], "nodes"),
        (["gpt2-xl", "a100-80gb", "--fix", "tensor"], "--fix tensor=8"),
        (["gpt2-xl", "a100-80gb", "--fix", "tensor=-2"], "tensor"),
        (["gpt2-xl", "a100-80gb", "--objective", "time=fast"], "time=2,headroom=1"),
        (["resnet-50", "a100-80gb"], "is not a transformer"),
    ],
)
def test_what_cannot_be_is_one_line_and_two(options, told, capsys):
    assert main(["plan", *options]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
