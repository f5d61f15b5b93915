"""The first line of every prediction and plan states the global batch and the sequence length."""

from __future__ import annotations

import re

import pytest

import shardscope as ss
from shardscope.cli import main
from shardscope.planner.trainer_config import trainer_config
from shardscope.runtime.launcher.preflight import preflight
from shardscope.spec.units import work_text
from shardscope_widgets import figures

MODEL = ss.Model.of("llama-3-8b")
CLUSTER = ss.Cluster.of("h100-80gb", nodes=2)
LAYOUT = ss.Layout(data=4, tensor=4, global_batch=1536, micro_batch=1, zero=1, sequence_parallel=True)


def first_line(shown: object) -> str:
    return str(shown).splitlines()[0]


def html_start(shown: object) -> str:
    text = shown._repr_html_()  # type: ignore[attr-defined]
    return re.sub(r"<[^>]*>", "\n", text).strip().splitlines()[0]


@pytest.mark.parametrize(("seq", "batch"), [(2048, 1536), (32768, 64), (131072, 16), (512, 4096), (64, 16)])
def test_layouts_and_their_simulations_and_plans_state_them(seq: int, batch: int) -> None:
    model, layout = MODEL.replace(seq=seq), LAYOUT.replace(global_batch=batch)
    work = f"global batch {batch:,}, sequence length {seq:,}"
    found = ss.predict(model, CLUSTER, layout)
    plans = ss.plan(model, CLUSTER, global_batch=batch, fix={"tensor": 4, "pipeline": 1, "context": 1}, top=2)
    shown: list[object] = [found, plans]
    if batch <= 64:
        shown.append(ss.simulate(model, CLUSTER, layout))
    for each in shown:
        assert work in first_line(each)
        assert work in html_start(each)
    assert found.to_dict()["seq"] == plans.to_dict()["seq"] == seq
    assert plans.to_dict()["global_batch"] == batch
    assert work in figures.plans_text(plans)


def test_a_search_without_a_plan_states_them_too() -> None:
    plans = ss.plan(
        ss.Model.of("gpt3-175b"), ss.Cluster.of("a100-40gb"), global_batch=24, fix={"offload": "none"}
    )
    assert not len(plans)
    for text in (first_line(plans), html_start(plans), figures.plans_text(plans)):
        assert work_text(24, 2048)[1:] in text


@pytest.mark.parametrize("software", ["megatron-core", "torchtitan"])
def test_settings_for_a_trainer_start_with_them(software: str) -> None:
    config = trainer_config(
        MODEL.replace(seq=4096), LAYOUT.replace(zero=3 if software == "torchtitan" else 1), software
    )
    assert config.remarks[0] == "The plan is for global batch 1,536, sequence length 4,096."


def test_jobs_state_them_and_models_without_sequences_only_the_batch(two_known_cores: None) -> None:
    gpt = ss.Job(model="gpt-nano", data="python-source", world_size=2, strategy="ring", batch=48)
    work = work_text(gpt.batch.global_batch, 64)
    for each in (ss.predict(gpt), ss.simulate(gpt)):
        assert work in first_line(each)
        assert work in html_start(each)
    assert work in str(preflight(gpt))
    mlp = first_line(ss.predict(ss.Job(model="mlp", data="digits", batch=96)))
    assert "global batch" in mlp
    assert "sequence" not in mlp


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "llama-3-8b", "h100-80gb", "--seq", "16384", "--global-batch", "32"],
        ["predict", "llama-3-8b", "h100-80gb", "--seq", "16384", "--global-batch", "32", "--data", "8"],
    ],
)
def test_the_command_line_states_them(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*command, "--nodes", "1"])
    assert "global batch 32, sequence length 16,384" in capsys.readouterr().out.splitlines()[0]
