"""Logs of Megatron, Megatron-DeepSpeed and torchtitan: right, or refused by the name of what cannot be read."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardscope as ss
from shardscope.errors import DataError, SpecError
from shardscope.measure.calibrate.logs import decoded, row_of_log
from shardscope.measure.calibrate.logs.arguments import kind_of
from shardscope.measure.calibrate.tables import Given, read_rows
from shardscope.spec.model import Transformer

pytestmark = pytest.mark.timeout(60)

BASE: dict[str, Any] = {
    "bf16": True, "fp16": False, "data_parallel_size": 4, "world_size": 32, "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "global_batch_size": 256, "micro_batch_size": 1,
    "num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_experts": None, "seq_length": 8192,
    "max_position_embeddings": 8192, "position_embedding_type": "learned_absolute", "optimizer": "adam",
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "sequence_parallel": True, "transformer_impl": "transformer_engine", "use_distributed_optimizer": True,
    "rank": 0, "lr": 0.0003, "data_path": "['/data/corpus_text_document']",
}  # fmt: skip
OLD = {
    name: value for name, value in BASE.items() if not name.startswith(("recompute", "context", "sequence_p"))
}
"""Arguments of a release before 2022."""


def arguments(base: dict[str, Any] | None = None, **changed: Any) -> str:
    values = {**(BASE if base is None else base), **changed}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *lines,
            "-------------------- end of arguments ---------------------",
            " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)",
            "",
        ]
    )


def step(number: int, ms: float, batch: int | None = 256, *, unit: str = "ms") -> str:
    of_batch = "" if batch is None else f" global batch size: {batch:5d} |"
    return (
        f" iteration {number:8d}/     500 | consumed samples: {number * 256:12d} | elapsed time per iteration "
        f"({unit}): {ms:.1f} | learning rate: 3.000E-04 |{of_batch} lm loss: 2.1E+00 | loss scale: 1.0 | grad norm: "
        "0.9 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def steps(times: Sequence[float], batch: int | None = 256, *, first: int = 1) -> str:
    return "".join(step(first + place, ms, batch) for place, ms in enumerate(times))


STEPS = steps([90000.0, 40000.0, 20010.0, 20000.0, 19990.0])


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


def row(text: str, given_model: Transformer | None = None) -> dict[str, Any]:
    return dict(row_of_log(text, "train.log", given_model))


def ms(text: str) -> float:
    found: float = row(text)["step_time_ms"]
    return found


def tps(text: str) -> float:
    found: float = row(text)["tokens_per_s_per_device"]
    return found


# The steps of Megatron.


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
        lambda text: "".join(f"[default3]:{line}\n" for line in text.splitlines()).encode(),
        lambda text: "".join(f"[rank31]: {line}\n" for line in text.splitlines()).encode(),
        lambda text: "".join(f"31: {line}\n" for line in text.splitlines()).encode(),
    ],
    ids=["utf-16", "utf-16-le", "utf-16-be", "utf-16-be marked", "utf-32", "utf-8 marked", "latin-1", "crlf", "zeros",
         "progress bars", "colours", "torchrun", "ranks", "srun"],
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
        DataError, match=rf"is of several runs, with {name}=.* and {name}={value}; give one file"
    ):
        row(arguments() + STEPS + arguments(**{name: value}) + STEPS)


# Arguments.


TABLE = json.loads(
    (Path(ss.__file__).parent / "measure/calibrate/logs/megatron_arguments.json").read_text(encoding="utf-8")
)


def test_each_argument_has_one_class() -> None:
    kinds = [kind for kind in TABLE if kind != "only_with"]
    names = [name for kind in kinds for name in TABLE[kind]]
    assert len(names) == len(set(names))
    assert {kind_of(name) for name in TABLE["read"]} == {"read"}
    assert kind_of("rl_use_sequence_packing") == "refused_if_set"  # by its name, before the family rl_*
    assert kind_of("rl_profile_dir") == "irrelevant"
    assert kind_of("warp_drive") == "unknown"
    for switch, effective in TABLE["only_with"].items():
        assert kind_of(switch) in {"read", "measured", *kinds}
        assert {kind_of(name) for name in effective} <= {"refused_if_set", "refused_unless"}


REFUSED: dict[str, Any] = {
    "mtp_num_layers": 1, "hybrid_override_pattern": "M-M*", "hybrid_layer_pattern": "M-M*", "is_hybrid_model": True,
    "fp4": "e2m1", "pipeline_model_parallel_split_rank": 1, "pipeline_model_parallel_layout": "Et*4|t*4L",
    "standalone_embedding_stage": True, "heterogeneous_layers_config_path": "/x.json", "spec": "['a', 'b']",
    "cpu_offloading_num_layers": 4, "fine_grained_activation_offloading": True, "offload_optimizer_states": True,
    "distribute_saved_activations": True, "distribute_checkpointed_activations": True, "grad_reduce_in_bf16": True,
    "fp32_residual_connection": True, "linear_attention_type": "gated_delta_net", "enable_hyper_connections": True,
    "experimental_attention_variant": "dsa", "partition_activations": True,
    "use_layer_wise_distributed_optimizer": True, "ds_sequence_parallel_size": 4, "mlp_chunks_for_training": 2,
    "curriculum_learning_legacy": True, "random_ltd": True,
    "enable_zbh1_pipeline": True, "decoder_num_layers": 12, "retro_add_retriever": True, "qk_l2_norm": True,
    "sft": True, "freeze_model": True, "tensor_parallel_num_weight_shards": 2, "attention_output_gate": True,
    "memory_centric_tiled_linear": True, "remote_device": "cpu", "load_teacher": "/teacher", "warp_drive": True,
    "a_name_that_is_longer_than_the_forty_eight_characters": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_rows_cannot_express_are_refused_by_name(name: str) -> None:
    value = REFUSED[name]
    more = {"recompute_granularity": "full"} if name == "distribute_saved_activations" else {}
    with pytest.raises(SpecError, match=rf"states {name}={re.escape(str(value))}, which rows cannot express"):
        row(arguments(**{name: value}, **more) + STEPS)
    for neutral in (None, False, [], TABLE["refused_unless"].get(name, ["0"])[0]):
        assert ms(arguments(**{name: neutral}) + STEPS) == 20000.0


@pytest.mark.parametrize(
    ("name", "value", "switch"),
    [
        ("cp_comm_type", "['a2a']", {"context_parallel_size": 2, "data_parallel_size": 2}),
        (
            "hierarchical_context_parallel_sizes",
            "[2, 4]",
            {"context_parallel_size": 2, "data_parallel_size": 2},
        ),
        ("fp8_param_gather", True, {"fp8": "hybrid"}),
        ("fp8_wgrad", False, {"fp8": "hybrid"}),
        ("first_last_layers_bf16", True, {"fp8": "e4m3"}),
        ("exp_avg_dtype", "torch.uint8", {"use_precision_aware_optimizer": True}),
        ("optimizer_offload_fraction", "0.5", {"optimizer_cpu_offload": True}),
        ("moe_expert_capacity_factor", "1.0", {"num_experts": 8}),
    ],
)
def test_arguments_that_need_another_are_refused_only_with_it(
    name: str, value: Any, switch: dict[str, Any]
) -> None:
    assert ms(arguments(**{name: value}) + STEPS) == 20000.0
    with pytest.raises(SpecError, match=rf"states {name}={re.escape(str(value))}, which rows cannot express"):
        row(arguments(**{name: value}, **switch) + STEPS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"multi_latent_attention": True}, "states multi_latent_attention=True, whose model its arguments alone"),
        ({"recompute_granularity": "selective", "recompute_modules": "['core_attn', 'mlp']"},
         r"recompute_modules=\['core_attn', 'mlp'\] recomputes other parts of a layer"),
        ({"recompute_granularity": "partial"}, "recompute_granularity=partial is not known"),
        ({"recompute_granularity": "full", "recompute_method": "mhc"}, "recompute_method=mhc is not known"),
        ({"optimizer": "lion"}, "optimizer=lion cannot be expressed by rows; those of adam, sgd, muon can"),
        ({"optimizer": "dist_muon"}, "optimizer=dist_muon cannot be expressed"),
        ({"position_embedding_type": "relative"}, "position_embedding_type=relative cannot be expressed"),
        ({"normalization": "L2Norm"}, "normalization=L2Norm cannot be expressed"),
        ({"softmax_type": "off-by-one"}, "softmax_type=off-by-one cannot be expressed"),
        ({"num_experts": 8, "expert_tensor_parallel_size": 1}, "expert_tensor_parallel_size=1 differs from"),
        ({"num_experts": "[64]"}, r"num_experts=\[64\] puts experts in some layers only"),
        ({"num_distributed_optimizer_instances": 3}, "num_distributed_optimizer_instances=3 does not divide the 4"),
        ({"data_parallel_size": 8}, "data_parallel_size=8, but world_size=32 makes 4 replicas"),
        ({"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "account_for_loss_in_pipeline_split": True},
         "account_for_embedding_in_pipeline_split=False with account_for_loss_in_pipeline_split=True"),
        ({"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "pp_partition_method": "parameters"},
         "pp_partition_method=parameters may put"),
        ({"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
          "microbatch_group_size_per_vp_stage": 4}, "microbatch_group_size_per_vp_stage=4 is not the pipeline's 2"),
        ({"pipe_parallel_size": 1}, "states pipe_parallel_size, as GPT-NeoX"),
    ],
)  # fmt: skip
def test_values_that_rows_cannot_express_are_refused_by_the_argument(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        row(arguments(**changed) + STEPS)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"num_distributed_optimizer_instances": 2}, {"zero": 1, "shard": 2}),
        ({"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": False}, {"zero": 0}),
        ({"use_torch_fsdp2": True, "torch_fsdp2_reshard_after_forward": False}, {"zero": 2}),
        ({"optimizer": "sgd"}, {"optimizer": "sgd"}),
        ({"optimizer_cpu_offload": True}, {"offload": "optimizer"}),
        ({"attention_backend": "AttnBackend.unfused"}, {"flash_attention": False}),
        ({"attention_backend": "AttnBackend.auto"}, {"flash_attention": True}),
        (
            {"recompute_granularity": "selective", "recompute_modules": "['core_attn']"},
            {"recompute": "selective"},
        ),
        ({"recompute_activations": True}, {"recompute": "selective"}),
        ({"recompute_modules": "['mlp']"}, {"recompute": "none"}),
        ({"fp8_hybrid": True}, {"precision": "fp8-mixed"}),
        ({"expert_tensor_parallel_size": 1}, {"expert": 1}),
    ],
)
def test_what_a_layout_expresses_is_read(changed: dict[str, Any], found: dict[str, Any]) -> None:
    read = row(arguments(**changed) + STEPS)
    assert {name: read.get(name) for name in found} == found


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"position_embedding_type": "alibi"}, {"positions": "alibi"}),
        ({"position_embedding_type": "PositionEmbeddingType.alibi"}, {"positions": "alibi"}),
        ({"position_embedding_type": "none"}, {"positions": "none"}),
        ({"add_position_embedding": False}, {"positions": "none"}),
        ({"add_position_embedding": False, "use_rotary_position_embeddings": True}, {"positions": "rotary"}),
        ({"position_embedding_type": "yarn"}, {"positions": "rotary"}),
        ({"max_position_embeddings": 32768}, {"num_positions": 32768}),
        ({"num_key_value_heads": 8}, {"kv_heads": 8}),
        ({"glu_activation": "geglu"}, {"gated": True}),
        ({"embed_layernorm": True}, {"embedding_norm": True}),
        ({"softmax_type": "learnable"}, {"attention_sinks": True}),
        ({"num_experts": "[1]"}, {"mixture": None}),
    ],
)
def test_models_are_what_the_arguments_describe(changed: dict[str, Any], found: dict[str, Any]) -> None:
    model = row(arguments(**changed) + STEPS)["model"]
    assert {name: getattr(model, name) for name in found} == found


def test_a_model_with_latent_attention_or_experts_has_to_be_the_one_that_is_given() -> None:
    given_model = ss.Model.of("deepseek-v3")
    assert isinstance(given_model, Transformer)
    assert given_model.mixture is not None
    assert given_model.latent is not None
    same = {
        "num_layers": given_model.layers, "hidden_size": given_model.hidden, "num_attention_heads": given_model.heads,
        "num_experts": given_model.mixture.experts, "moe_router_topk": given_model.mixture.active,
        "multi_latent_attention": True, "kv_lora_rank": given_model.latent.kv_rank,
    }  # fmt: skip
    assert "model" not in row(arguments(**same) + STEPS, given_model)
    for name, value in [("moe_router_topk", 2), ("num_experts", 64)]:
        with pytest.raises(SpecError, match=rf"states {name}={value}, but model='deepseek-v3' has"):
            row(arguments(**{**same, name: value}) + STEPS, given_model)
    with pytest.raises(SpecError, match="states multi_latent_attention=True"):
        row(arguments(**{**same, "kv_lora_rank": 128}) + STEPS, given_model)


@pytest.mark.parametrize(
    ("old", "recomputed"),
    [
        ({"checkpoint_activations": True, "checkpoint_num_layers": 1}, ("full", 0)),
        ({"checkpoint_activations": False, "checkpoint_num_layers": 1}, ("none", 0)),
        ({"activations_checkpoint_method": "uniform", "activations_checkpoint_num_layers": 2}, ("full", 0)),
        ({"activations_checkpoint_method": "block", "activations_checkpoint_num_layers": 7}, ("full", 7)),
        ({"activations_checkpoint_method": None, "activations_checkpoint_num_layers": 1}, ("none", 0)),
    ],
)
def test_recomputation_is_read_by_its_names_before_2022(
    old: dict[str, Any], recomputed: tuple[str, int]
) -> None:
    found = row(arguments(OLD, **old) + STEPS)
    assert (found["recompute"], found.get("recompute_layers", 0)) == recomputed


def deepspeed(**zero: Any) -> str:
    """The end of what DeepSpeed prints of its configuration, whose world_size counts replicas."""
    settings = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    lines = [
        f"zero_optimization_stage ...... {zero['stage']}", "world_size ................... 4",
        "train_batch_size ............. 256", "train_micro_batch_size_per_gpu  1",
        f"json = {json.dumps(settings, indent=4)}",
    ]  # fmt: skip
    return "".join(f"[2022-01-02 03:04:05,678] [INFO] [config.py:904:print]   {line}\n" for line in lines)


CPU = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("changed", "zero", "found"),
    [
        ({"zero_stage": 1}, None, (1, "none")),
        ({"zero_stage": "1.0"}, None, (1, "none")),
        ({"zero_stage": 1}, {"stage": 3}, (3, "none")),
        ({"zero_stage": 2, "cpu_optimizer": True}, None, (2, "optimizer")),
        ({"zero_stage": 2, "cpu_offload": True}, None, (2, "optimizer")),
        ({"zero_stage": 2}, {"stage": 2, "offload_optimizer": CPU}, (2, "optimizer")),
        ({"zero_stage": 2}, {"stage": 2, "cpu_offload": True}, (2, "optimizer")),
        ({"zero_stage": 3}, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, (3, "states")),
        (
            {"zero_stage": 1, "checkpoint_in_cpu": True, "checkpoint_activations": True},
            None,
            (1, "activations"),
        ),
        (
            {"zero_stage": 0, "pipeline_model_parallel_size": 2, "data_parallel_size": 2},
            {"stage": 0},
            (1, "none"),
        ),
        ({"zero_stage": 0, "bf16": False, "fp16": True}, {"stage": 0}, (0, "none")),
    ],
)
def test_a_log_of_megatron_deepspeed_states_its_stage_and_what_it_offloads(
    changed: dict[str, Any], zero: dict[str, Any] | None, found: tuple[int, str]
) -> None:
    text = arguments(OLD, deepspeed=True, use_distributed_optimizer=False, **changed)
    read = row(text + ("" if zero is None else deepspeed(**zero)) + STEPS)
    assert (read["zero"], read["offload"], read["software"]) == (*found, "megatron-deepspeed")
    assert read["data"] == changed.get("data_parallel_size", 4)


@pytest.mark.parametrize(
    ("changed", "zero", "message"),
    [
        ({"zero_stage": None}, None, "deepspeed=True with zero_stage=None does not say ZeRO's stage"),
        (
            {"zero_stage": 3},
            {"stage": 3, "offload_param": {"device": "nvme"}},
            "offload to device='nvme' cannot",
        ),
        ({"zero_stage": 3}, {"stage": 3, "offload_param": CPU}, "offload of param to the CPU cannot"),
        (
            {"zero_stage": 1, "micro_batch_size": 2},
            {"stage": 1},
            "micro_batch_size=2 contradicts DeepSpeed's train_mi",
        ),
        (
            {"zero_stage": 1, "global_batch_size": 512},
            {"stage": 1},
            "global_batch_size=512 contradicts DeepSpeed's",
        ),
    ],
)
def test_a_log_of_megatron_deepspeed_that_rows_cannot_express_is_refused(
    changed: dict[str, Any], zero: dict[str, Any] | None, message: str
) -> None:
    text = arguments(OLD, deepspeed=True, **changed) + ("" if zero is None else deepspeed(**zero))
    with pytest.raises(SpecError, match=message):
        row(text + STEPS)


def test_stages_with_a_layer_less_at_both_ends_are_read_by_each_of_their_names() -> None:
    few = {"pipeline_model_parallel_size": 14, "data_parallel_size": 1, "world_size": 112, "num_layers": 40}
    both = dict.fromkeys(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True
    )
    for more in (both, {"pp_partition_method": "type:transformer|embedding"}):
        assert row(arguments(**few, **more) + STEPS)["pipeline"] == 14


# torchtitan.


@pytest.mark.parametrize("version", ["0.0", "0.1", "0.2", "0.3"])
def test_the_lines_of_each_version_of_torchtitan_are_read(version: str) -> None:
    text = "".join(titan(n, 600 * n, version=version) for n in (1, 10, 20, 30, 40))
    assert tps(text) == 18000
    coloured = (
        text.replace("step:", "\x1b[36mstep:").replace("loss", "\x1b[32mloss").replace("mfu", "\x1b[35mmfu")
    )
    assert tps(coloured) == tps(coloured.replace("\x1b", "")) == 18000


@pytest.mark.parametrize("word", ["validate", "validation", "Validate", "eval", "val"])
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
    if logged > lag + 1:  # or else a rank may finish before another begins, as a run that is started again does
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
