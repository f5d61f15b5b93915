"""One layout predicted: its figures agree with each other, and open into terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardscope as ss
from shardscope import cli
from shardscope.analytic.show import figure, term_html, term_text
from shardscope.errors import SpecError
from shardscope.prediction.layout import Prediction

MODEL = ss.Model.transformer(name="gpt3-175b", layers=96, hidden=12288, heads=96, vocab=51200, seq=2048)
CLUSTER = ss.Cluster.of("a100-80gb", nodes=128)
LAYOUT = ss.Layout(
    data=8, tensor=8, pipeline=16, global_batch=1536, schedule="interleaved", virtual_stages=3,
    recompute="full", precision="fp16-mixed", flash_attention=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return ss.predict(MODEL, CLUSTER, LAYOUT)


def test_the_figures_follow_from_the_step(prediction: Prediction) -> None:
    step, tokens = prediction.step_time_s, 1536 * 2048
    assert prediction.tokens_per_s == pytest.approx(tokens / step)
    assert prediction.time_to_train(300e9) == pytest.approx(300e9 / tokens * step)
    flops = 72 * 1536 * 96 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 12288 * 96))
    assert prediction.mfu == pytest.approx(flops / (1024 * 312e12 * step))
    assert prediction.hfu > prediction.mfu
    low, high = prediction.interval
    assert low < step < high


def test_gpt_3_trains_in_about_the_days_the_paper_says(prediction: Prediction) -> None:
    """34 days on 1,024 A100 (Narayanan et al. 2021, section 5.1): within the prediction's own interval."""
    days = prediction.time_to_train(300e9) / 86400
    low, high = (edge / prediction.step_time_s * days for edge in prediction.interval)
    assert low < 34 < high


def test_dollars_are_hours_times_devices_times_price() -> None:
    priced = ss.predict(MODEL, CLUSTER.replace(price_per_device_hour=2.0), LAYOUT)
    assert priced.dollars(1e9) == pytest.approx(priced.time_to_train(1e9) / 3600 * 1024 * 2.0)
    with pytest.raises(SpecError, match="has no price"):
        ss.predict(MODEL, CLUSTER.replace(price_per_device_hour=None), LAYOUT).dollars(1e9)
    with pytest.raises(SpecError, match="tokens=0"):
        priced.time_to_train(0)


def test_every_leaf_has_a_formula_and_a_source(prediction: Prediction) -> None:
    for term in prediction.time.walk():
        if not term.parts:
            assert term.formula, term.name
            assert term.source, term.name
            assert term.inputs, term.name


def test_the_prediction_is_readable_and_goes_to_json(prediction: Prediction) -> None:
    assert "pipeline bubble" in repr(prediction)
    assert prediction._repr_html_().count("<details") == prediction._repr_html_().count("</details>") > 10
    read = json.loads(json.dumps(prediction.to_dict()))
    assert read["step_time_s"] == pytest.approx(sum(part["value"] for part in read["time"]["parts"]))


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="tensor=5"):
        ss.predict(MODEL, ss.Cluster.of("a100-80gb", nodes=1, per_node=5), ss.Layout(tensor=5))
    with pytest.raises(SpecError, match="devices"):
        ss.predict(MODEL, CLUSTER, ss.Layout())
    with pytest.raises(SpecError, match="calibration takes a Calibration, got 'a100-megatron'"):
        ss.predict(MODEL, CLUSTER, LAYOUT, calibration="a100-megatron")  # type: ignore[call-overload]


def test_a_device_never_measured_is_said_to_be() -> None:
    found = ss.predict(
        MODEL,
        ss.Cluster.of("mi250x", nodes=1, per_node=8),
        ss.Layout(data=8, global_batch=8, precision="fp16-mixed"),
    )
    assert "never measured" in repr(found)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (3.2e9, "bytes", "3.2 GB"),
        (3.2 * 2**30, "GiB", "3.2 GiB"),
        (1.26e8, "FLOP", "126 MFLOP"),
        (0.0, "s", "0 s"),
        (2, "USD", "2 USD"),
    ],
)
def test_figures_carry_a_fitting_unit(value: float, unit: str, text: str) -> None:
    assert figure(value, unit) == text


def test_html_escapes_what_a_user_named() -> None:
    term = ss.predict(MODEL.replace(name="<b>"), CLUSTER, LAYOUT)
    assert "<b>" not in term._repr_html_().replace("<strong>", "")
    assert "&lt;" in term_html(term.time.__class__("a<b", 1.0, "s"))
    assert term_text(term.time).splitlines()[0].startswith("step")


def test_the_command_predicts_a_model_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}
    path.write_text(
        json.dumps(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, **sizes}
        )
    )
    options = ["--data", "8", "--global-batch", "16", "--recompute", "full", "--json", "--seq", "1024"]
    assert cli.main(["predict", str(path), "h100-80gb", *options]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["tokens_per_s"] * read["step_time_s"] == pytest.approx(16 * 1024)
    assert cli.main(["predict", str(path), "h100-80gb", *options, "--global-batch", "15"]) == 2
    assert "global_batch=15" in capsys.readouterr().err


def test_what_neither_the_host_nor_its_drives_hold_does_not_fit() -> None:
    layout = ss.Layout(tensor=8, offload="all", recompute="full")
    node = CLUSTER.replace(nodes=1, host_memory_bytes="4 TB")
    assert ss.predict(MODEL, node, layout).fits
    small = node.replace(host_memory_bytes="1 TB", nvme_bytes=0)
    assert not ss.predict(MODEL, small, layout).fits
    assert "does not fit" in repr(ss.predict(MODEL, small, layout))
    assert ss.predict(MODEL, small.replace(nvme_bytes="4 TB"), layout).fits


@pytest.mark.parametrize("tokens", ["0", "nan", "inf"])
def test_the_command_prints_nothing_but_the_problem_where_tokens_are_none(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["predict", "gpt2", "a100-80gb", "--per-node", "1", "--json", "--tokens", tokens]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "is not a number of tokens" in told.err


def test_a_model_may_be_given_by_its_name() -> None:
    by_name = ss.predict("gpt3-175b", CLUSTER, LAYOUT)
    assert by_name.to_dict() == ss.predict(ss.Model.of("gpt3-175b"), CLUSTER, LAYOUT).to_dict()
