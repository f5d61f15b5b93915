"""Published memory beside predictions: peaks by software, and which runs are said to fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from published.memory.board import (
    fit_lines,
    memory_tables,
    peak_lines,
    runs_that_ran,
    total_fits,
    without_largest,
)
from published.tables import published
from shardscope import cli
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import FRAMEWORKS, memory_term, process_bytes, stage_memory, tensor_room
from shardscope.analytic.memory.rows import rows_of
from shardscope.analytic.memory.stage import Blocks, blocks_of
from shardscope.calibration.software import SOFTWARE, memory_model
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

GPT2_XL = Transformer(name="gpt2-xl", layers=48, hidden=1600, heads=25, vocab=50257, seq=1024)
DEEPSPEED_STAGES = (
    19961.07, 17461.95, 17189.95, 16917.95, 16645.95, 16373.95, 16101.95, 15829.94, 15557.94, *[15446.85] * 6, 18175.38,
)  # fmt: skip
"""MiB that were allocated at most on each stage (bigscience, gpt2-meg-ds-3d/meg_ds_3d_gpt2_perf_n16-ds-on.out)."""


@pytest.mark.parametrize(
    ("table", "mape", "worst"),
    [
        ("Megatron-LM, B200", 0.2, 1),
        ("torchtitan, H100", 5, 10),
        ("torchtitan, H200", 5, 5),
        ("DeepSpeed pipeline, V100", 5, 5),
        ("DeepSpeed ZeRO 3, V100", 2, 2),
        ("DDP of Lightning, A100", 2, 2),
        ("DDP of minGPT, A100", 1, 1),
        ("ZeRO 3 of Lightning, A100", 3, 5),
        ("ZeRO 3 of minGPT, A100", 5, 6),
        ("MLPerf, H100, first stage", 1, 1.2),
        ("MLPerf, H200, first stage", 1, 1.1),
        ("MLPerf, GB200, first stage", 3, 6),
    ],
)
def test_published_peaks_have_the_errors_that_are_documented(table: str, mape: float, worst: float) -> None:
    """Errors above 5 % and their causes, as far as they are known, are in the docstring of `memory/replicas.py`."""
    (line,) = peak_lines({table: memory_tables()[table]})
    assert line.mape < mape
    assert line.worst < worst


@pytest.mark.slow
def test_few_runs_that_ran_are_said_not_to_fit_and_most_out_of_memory_errors_are_foreseen() -> None:
    lines = fit_lines(memory_tables() | runs_that_ran())
    all_of_them = total_fits(lines)
    assert all_of_them.ran > 610
    assert all_of_them.refused <= 0.02 * all_of_them.ran
    assert (all_of_them.foreseen, all_of_them.ran_out) == (284, 332)
    others = without_largest(lines)
    assert (others.dataset, others.foreseen, others.ran_out) == ("without Hagemann et al., A100", 10, 14)
    many = next(line for line in lines if line.dataset == "Hagemann et al., A100")
    assert (many.foreseen, many.ran_out, many.refused, many.ran) == (274, 318, 3, 242)


@pytest.mark.parametrize(
    ("framework", "of_16_bits", "of_float32"),
    [("megatron-core", 2, 4), ("nemo", 2, 4), ("torchtitan", 4, 8), ("fsdp2", 14, 12)],
)
def test_logits_in_fp32_are_as_wide_as_its_activations(
    framework: str, of_16_bits: int, of_float32: int
) -> None:
    small, large = (
        Transformer(name="gpt", layers=2, hidden=64, heads=4, vocab=vocab, seq=512) for vocab in (1000, 2000)
    )
    for precision, expected in (("bf16-mixed", of_16_bits), ("fp32", of_float32)):
        layout = Layout.model_validate({"micro_batch": 4, "global_batch": 4, "precision": precision})
        rows = [rows_of(model, Layouts.of([layout]), FRAMEWORKS[framework]) for model in (small, large)]
        less, more = (float(np.ravel(each.at_loss)[0]) for each in rows)
        assert more - less == pytest.approx(expected * 1000 * 4 * 512)


def test_logits_that_each_tensor_rank_gathers_whole_and_a_norm_in_pieces_take_more() -> None:
    model = Transformer(name="gpt", layers=4, hidden=256, heads=4, vocab=32000, seq=512, gated=True)
    layout = Layout(tensor=2, micro_batch=4, global_batch=8)
    scaling = FRAMEWORKS["scaling"]
    held, parallel, in_pieces = (
        float(stage_memory(model, layout, framework=known).total[0])
        for known in (scaling, scaling._replace(whole_logits=False), scaling._replace(norm_copies=1))
    )
    tokens = 4 * 512
    assert held - parallel == pytest.approx(16 * 32000 * tokens / 2)
    assert in_pieces - held == pytest.approx(4 * 2 * 2 * 256 * tokens)  # two norms in each of four layers


def test_a_run_in_a_table_of_memory_and_in_one_of_times_counts_once() -> None:
    tables = runs_that_ran()
    assert len(published()["DeepSpeed 0.3, V100"]) == 16
    alone = [(row.layout.tensor, row.layout.micro_batch) for row in tables["DeepSpeed 0.3, V100"]]
    assert alone == [(1, 16), (4, 24), (2, 16)]
    runs = [(row.run, row.settings) for rows in (memory_tables() | tables).values() for row in rows]
    assert len(set(runs)) == len(runs)


def test_data_parallel_replicas_of_pytorch_copy_gradients_to_reduce_them_and_the_terms_say_so() -> None:
    model = Transformer(name="gpt", layers=8, hidden=1024, heads=8, vocab=32000, seq=512)
    one, two = (
        stage_memory(
            model,
            Layout(data=data, zero=0, global_batch=data, precision="fp16-autocast"),
            framework="lightning",
        )
        for data in (1, 2)
    )
    assert two.total - one.total == pytest.approx(one.gradients)
    layout = Layout(data=2, zero=0, global_batch=2, precision="fp16-autocast")
    copies = memory_term(model, layout, framework="lightning")["stage 0"]["buffers"]["gradient bucket"]
    assert copies.value == pytest.approx(float(one.gradients[0]))
    assert copies.formula == "copies of all gradients"
    flat = memory_term(model, layout.replace(offload="states"), framework="deepspeed")["stage 0"]["buffers"]
    assert flat["gradient bucket"].formula.startswith("flat buffers")


def deepspeed_blocks(
    recompute: str = "full", zero: int = 3, name: str = "deepspeed-0.5", **changes: Any
) -> Blocks:
    layout = Layout.model_validate(
        {"data": 4, "zero": zero, "global_batch": 4, "recompute": recompute, "precision": "fp16-mixed"}
    )
    rows = rows_of(GPT2_XL, Layouts.of([layout]), FRAMEWORKS[name]._replace(**changes))
    return blocks_of(rows, np.zeros(1))


def test_deepspeed_reduces_gradients_from_buffers_that_today_stay_in_the_update() -> None:
    """A gradient that exceeds a buffer is reduced beside them; without shards of gradients, there are no buffers."""
    two, largest = 2 * 2 * 5e8, 50257 * 1600
    assert deepspeed_blocks().bucket == two
    assert deepspeed_blocks(bucket_elements=8e7).bucket == 2 * (2 * 8e7 + largest)
    assert deepspeed_blocks(zero=1).bucket == 0
    assert deepspeed_blocks(zero=2).bucket == two / 2
    today = deepspeed_blocks(name="deepspeed")
    assert today.bucket == two / 2
    assert today.standing == today.bucket
    assert today.update - deepspeed_blocks().update == pytest.approx(two / 2)
    second = deepspeed_blocks(name="deepspeed", zero=2)
    assert (second.bucket, second.standing) == (two / 2, 0)
    assert second.update == pytest.approx(6 * GPT2_XL.num_params / 4)


@pytest.mark.parametrize(("recompute", "elements"), [("none", GPT2_XL.num_params), ("full", 1e9 + 5e7)])
def test_autograd_holds_gathered_weights_of_layers_that_are_not_recomputed(
    recompute: str, elements: float
) -> None:
    assert deepspeed_blocks(recompute, holds_gathered=True).gathered == pytest.approx(2 * elements)
    assert deepspeed_blocks(recompute).gathered == 2 * (1e9 + 5e7)


def test_no_table_of_memory_has_the_name_of_a_table_of_step_times() -> None:
    assert not memory_tables().keys() & runs_that_ran().keys()


def test_every_stage_of_a_pipeline_of_deepspeed_is_within_five_percent() -> None:
    model = Transformer(name="gpt", layers=64, hidden=8192, heads=32, vocab=50688, seq=1024)
    layout = Layout(
        tensor=4, pipeline=16, global_batch=1024, micro_batch=4, recompute="full", flash_attention=False,
        precision="fp16-mixed",
    )  # fmt: skip
    held = stage_memory(model, layout, framework="megatron-deepspeed").total / 2**20
    assert held.tolist() == pytest.approx(DEEPSPEED_STAGES, rel=0.05)


def test_the_update_is_the_peak_of_stages_with_few_micro_batches_and_the_terms_say_so() -> None:
    model = Transformer(name="gpt", layers=16, hidden=2048, heads=16, vocab=50304, seq=512)
    layout = Layout(pipeline=8, global_batch=64, recompute="full", precision="fp16-mixed")
    held = stage_memory(model, layout, framework="megatron-deepspeed")
    term = memory_term(model, layout, framework="megatron-deepspeed")
    assert [part.value for part in term.parts] == pytest.approx(held.total.tolist())
    parameters = term["stage 6"]["parameters"].value / 2
    assert term["stage 6"]["gradients during the update"].value == pytest.approx(4 * parameters)
    assert term["stage 6"]["activations"].value == 0


def test_embedding_and_output_take_a_layers_place_if_that_makes_stages_equal() -> None:
    model = Transformer(name="gpt", layers=6, hidden=256, heads=4, vocab=1000, seq=64)
    layer, table, positions = model.layer_params, 1000 * 256, 64 * 256
    ends = [layer + table + positions, layer + table + 2 * 256]
    layout = Layout(pipeline=4, global_batch=4)
    held = stage_memory(model, layout, framework="paper").parameters / 2
    assert held.tolist() == pytest.approx([ends[0], 2 * layer, 2 * layer, ends[1]])
    uneven = stage_memory(model.replace(layers=7), layout, framework="paper").parameters / 2
    assert uneven.tolist() == pytest.approx([ends[0] + layer, 2 * layer, 2 * layer, ends[1]])


def test_recipes_of_nvidia_keep_gradients_in_16_bits_and_no_16_bit_weights_beside_fp8_ones() -> None:
    model = Transformer(name="gpt", layers=8, hidden=1024, heads=8, vocab=32000, seq=512)
    layout = Layout(data=2, zero=1, global_batch=2, precision="fp8-mixed")
    core, nemo, bridge = (
        stage_memory(model, layout, framework=name) for name in ("megatron-core", "nemo", "megatron-bridge")
    )
    assert core.gradients == pytest.approx(2 * nemo.gradients)
    assert bridge.gradients == pytest.approx(core.gradients)
    assert bridge.parameters == pytest.approx(nemo.parameters)
    assert core.parameters - nemo.parameters == pytest.approx(2 * 8 * 12 * 1024**2)
    narrow = layout.replace(precision="bf16-mixed")
    core, nemo = (stage_memory(model, narrow, framework=name) for name in ("megatron-core", "nemo"))
    assert nemo.optimizer == pytest.approx(core.optimizer * 10 / 12)


@pytest.mark.parametrize("device", ["a100-80gb", "mi300x", "tpu-v5p"])
def test_the_room_for_tensors_is_what_a_process_leaves_with_or_without_a_known_context(device: str) -> None:
    for name in FRAMEWORKS:
        found = Device.of(device)
        room = tensor_room(found, name)
        assert process_bytes(found, name, room) == pytest.approx(found.memory_bytes)
        assert room < found.memory_bytes or name == "paper"


def test_one_byte_of_context_takes_one_byte_of_a_process_and_a_cpu_rank_has_its_whole_memory() -> None:
    own = Device(
        name="mine", memory_bytes=80e9, peak_flops={"fp32": 1e12}, memory_bandwidth=1e9, source="made"
    )
    lost = tensor_room(own, "megatron-deepspeed") - tensor_room(
        own.replace(context_bytes=1), "megatron-deepspeed"
    )
    assert 0 < lost < 2
    cpu = Device.of("cpu")
    assert tensor_room(cpu, "fsdp2") == cpu.memory_bytes


def test_software_without_constants_of_its_own_shares_those_of_another() -> None:
    assert all(each.measured_as in SOFTWARE for each in SOFTWARE.values())
    assert {memory_model(name) for name in SOFTWARE} <= set(FRAMEWORKS)
    assert len({memory_model(name) for name in ("megatron-core", "nemo", "megatron-bridge")}) == 3


def test_the_command_prints_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard", "--memory"]) == 0
    printed = capsys.readouterr().out
    assert "process (nvidia-smi)" in printed
    assert "all tables" in printed
    assert "284 of 332 runs that ran out of memory (86 %) are predicted to" in printed
    assert cli.main(["scoreboard", "--memory", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {line["dataset"]: line["runs"] for line in found["peaks"]}["Megatron-LM, B200"] == 11
    fitted = {line["dataset"] for line in found["peaks"] if line["rows"] == "fitted"}
    assert fitted == {
        "Megatron-LM, B200", "MLPerf, H100, first stage", "MLPerf, H200, first stage", "MLPerf, GB200, first stage",
        "DDP of Lightning, A100", "ZeRO 3 of Lightning, A100", "DDP of minGPT, A100", "ZeRO 3 of minGPT, A100",
    }  # fmt: skip
    assert {line["dataset"]: line["framework"] for line in found["peaks"]}["Mist, L4"] == "deepspeed"
    assert np.isfinite([line["mape"] for line in found["peaks"]]).all()


def test_memory_and_own_rows_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scoreboard", "--memory", "--rows", "steps.csv"]) != 0
    assert "--memory compares published memory" in capsys.readouterr().err
