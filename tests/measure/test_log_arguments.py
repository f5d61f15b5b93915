"""The arguments in logs of Megatron and Megatron-DeepSpeed: read, without effect, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.measure.trainer_logs import OLD, STEPS, arguments, ms, row
from tests.measure.trainer_logs import arguments as logged

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.measure.calibrate.logs.arguments import kind_of
from shardscope.spec.model import Transformer

pytestmark = pytest.mark.timeout(60)

TABLE = json.loads(
    (Path(ss.__file__).parent / "measure/calibrate/logs/megatron_arguments.json").read_text(encoding="utf-8")
)


def test_each_argument_has_one_class() -> None:
    kinds = [kind for kind in TABLE if kind not in {"only_with", "words_of_unknown", "refused_of_deepspeed"}]
    names = [name for kind in kinds for name in TABLE[kind]]
    assert len(names) == len(set(names))
    assert {kind_of(name) for name in TABLE["read"]} == {"read"}
    assert kind_of("rl_use_sequence_packing") == "refused_if_set"  # by its name, before the family rl_*
    assert kind_of("rl_profile_dir") == "irrelevant"
    assert kind_of("swap_attention") == "unknown"
    assert kind_of("template_type") == "irrelevant"
    for switch, effective in TABLE["only_with"].items():
        assert kind_of(switch) in {"read", "measured", *kinds}
        assert {kind_of(name) for name in effective} <= {"refused_if_set", "refused_unless"}


REFUSED: dict[str, Any] = {
    "mtp_num_layers": 1, "hybrid_override_pattern": "M-M*", "hybrid_layer_pattern": "M-M*", "is_hybrid_model": True,
    "fp4": "e2m1", "pipeline_model_parallel_split_rank": 1, "pipeline_model_parallel_layout": "Et*4|t*4L",
    "standalone_embedding_stage": True, "heterogeneous_layers_config_path": "/x.json", "spec": "['a', 'b']",
    "cpu_offloading_num_layers": 4, "fine_grained_activation_offloading": True, "offload_optimizer_states": True,
    "distribute_saved_activations": True, "distribute_checkpointed_activations": True,
    "fp32_residual_connection": True, "linear_attention_type": "gated_delta_net", "enable_hyper_connections": True,
    "experimental_attention_variant": "dsa", "partition_activations": True,
    "use_layer_wise_distributed_optimizer": True, "ds_sequence_parallel_size": 4, "mlp_chunks_for_training": 2,
    "curriculum_learning_legacy": True, "random_ltd": True,
    "enable_zbh1_pipeline": True, "decoder_num_layers": 12, "retro_add_retriever": True, "qk_l2_norm": True,
    "sft": True, "freeze_model": True, "tensor_parallel_num_weight_shards": 2, "attention_output_gate": True,
    "memory_centric_tiled_linear": True, "remote_device": "cpu", "load_teacher": "/teacher", "noop_layers": "0,1",
    "swap_attention": True, "a_name_of_a_layer_that_is_longer_than_48_characters": 3,
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
        ("fp8_wgrad", False, {"fp8": "hybrid"}),
        ("first_last_layers_bf16", True, {"fp8": "e4m3"}),
        ("exp_avg_dtype", "torch.uint8", {"use_precision_aware_optimizer": True}),
        ("optimizer_offload_fraction", "0.5", {"optimizer_cpu_offload": True}),
        ("moe_expert_capacity_factor", "1.0", {"num_experts": 8}),
        ("moe_train_capacity_factor", "1.0", {"num_experts": 8}),
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
        ({"optimizer": "lion"}, "optimizer=lion cannot be expressed by rows; those of adam, adamw, sgd, muon can"),
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
        ({"pipe_parallel_size": 1}, "states pipe_parallel_size=1, as GPT-NeoX"),
        ({"batch_size": 48}, "states batch_size=48, as Megatron before 2.0"),
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
        ({"optimizer": "adamw"}, {"optimizer": None}),
        ({"optimizer_cpu_offload": True}, {"offload": "optimizer"}),
        ({"attention_backend": "AttnBackend.unfused"}, {"flash_attention": False}),
        ({"attention_backend": "AttnBackend.auto"}, {"flash_attention": True}),
        (
            {"recompute_granularity": "selective", "recompute_modules": "['core_attn']"},
            {"recompute": "selective"},
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": '["core_attn"]'},
            {"recompute": "selective"},
        ),
        ({"grad_reduce_in_bf16": True, "main_grads_dtype": "torch.bfloat16"}, {"precision": "bf16-mixed"}),
        ({"fp8": "hybrid", "fp8_param_gather": True, "fp32_allreduce": True}, {"precision": "fp8-mixed"}),
        ({"recompute_activations": True}, {"recompute": "selective"}),
        ({"recompute_modules": "['mlp']"}, {"recompute": "none"}),
        ({"fp8_hybrid": True}, {"precision": "fp8-mixed"}),
        ({"expert_tensor_parallel_size": 1}, {"expert": 1}),
        ({"batch_size": None, "model_parallel_size": None}, {"micro_batch": 1, "tensor": 8}),
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("virtual_pipeline_model_parallel_size", 5),
        ("num_virtual_stages_per_pipeline_rank", 5),
        ("num_layers_per_virtual_pipeline_stage", 4),
    ],
)
def test_stages_on_each_rank_are_read_by_each_of_their_names(name: str, value: int) -> None:
    piped = {
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": 2,
    }
    found = row(arguments(**piped, **{name: value}) + STEPS)
    assert (found["virtual_stages"], found["schedule"]) == (5, "interleaved")
    assert row(arguments(**{name: value}) + STEPS)["virtual_stages"] == 1


def test_a_log_of_gpt_neox_is_refused_by_what_it_states() -> None:
    values = {
        "pipe_parallel_size": "1...default",
        "hidden_size": "4096...updated",
        "model_parallel_size": "2...updated",
    }
    lines = [f"  {name} {'.' * (32 - len(name))} {value}\n" for name, value in values.items()]
    text = "".join(
        ["-------- arguments --------\n", *lines, "---------------- end of arguments ----------------\n"]
    )
    with pytest.raises(SpecError, match=r"states pipe_parallel_size=1\.\.\.default, as GPT-NeoX"):
        row(text + STEPS)


def test_a_model_with_latent_attention_or_experts_has_to_be_the_one_that_is_given() -> None:
    given_model = ss.Model.of("deepseek-v3")
    assert isinstance(given_model, Transformer)
    assert given_model.mixture is not None
    assert given_model.latent is not None
    same = {
        "num_layers": given_model.layers, "hidden_size": given_model.hidden, "num_attention_heads": given_model.heads,
        "num_experts": given_model.mixture.experts, "moe_router_topk": given_model.mixture.active,
        "multi_latent_attention": True, "kv_lora_rank": given_model.latent.kv_rank, "tensor_model_parallel_size": 8,
    }  # fmt: skip

    def arguments(**changed: Any) -> str:
        return logged(**changed).replace("new size: 51200", "new size: 129280")

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
            {"stage": 3, "zero_hpz_partition_size": 8},
            "zero_hpz_partition_size=8, which rows cannot",
        ),
        (
            {"zero_stage": 3},
            {"stage": 3, "zero_quantized_weights": True},
            "zero_quantized_weights=True, which rows",
        ),
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


def test_a_stage_alone_is_deepspeed_s_and_offloading_without_it_is_refused() -> None:
    without = {"use_distributed_optimizer": False}
    found = row(arguments(OLD, zero_stage=2, cpu_offload=True, **without) + STEPS)
    assert (found["zero"], found["offload"], found["software"]) == (2, "optimizer", "megatron-deepspeed")
    found = row(arguments(OLD, zero_stage=2, deepspeed=False) + STEPS)
    assert (found["zero"], found["software"]) == (1, "megatron-core")
    for name in ("cpu_offload", "cpu_optimizer", "checkpoint_in_cpu"):
        with pytest.raises(SpecError, match=f"{name}=True without deepspeed=True cannot be expressed"):
            row(arguments(OLD, deepspeed=False, zero_stage=1, **{name: True}) + STEPS)


def test_the_whole_configuration_of_deepspeed_is_read_or_refused() -> None:
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "OneBitAdam"}}
    text = arguments(OLD, deepspeed=True, zero_stage=1)
    printed = f"[INFO] [config.py:950:print_user_config]   json = {json.dumps(config, indent=4)}\n"
    with pytest.raises(SpecError, match="has optimizer.type='OneBitAdam', which rows cannot express"):
        row(text + printed + STEPS)
    noisy = printed.replace("OneBitAdam", "AdamW").replace(
        '    "optimizer"', 'rank 3 is ready\n    "optimizer"'
    )
    assert row(text + noisy + STEPS)["zero"] == 1
    with pytest.raises(SpecError, match="DeepSpeed's configuration .* is incomplete"):
        row(text + printed[:-20] + "\n" + STEPS)


def test_stages_with_a_layer_less_at_both_ends_are_read_by_each_of_their_names() -> None:
    few = {"pipeline_model_parallel_size": 14, "data_parallel_size": 1, "world_size": 112, "num_layers": 40}
    both = dict.fromkeys(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True
    )
    for more in (both, {"pp_partition_method": "type:transformer|embedding"}):
        assert row(arguments(**few, **more) + STEPS)["pipeline"] == 14


def _log_of(given_model: Transformer, vocab: int, **changed: Any) -> str:
    same: dict[str, Any] = {
        "num_layers": given_model.layers, "hidden_size": given_model.hidden, "num_attention_heads": given_model.heads,
        "group_query_attention": True, "num_query_groups": given_model.kv_heads, "kv_channels": None,
        "ffn_hidden_size": given_model.ffn, "make_vocab_size_divisible_by": 128,
    }  # fmt: skip
    if (mixture := given_model.mixture) is not None:
        same |= {
            "num_experts": mixture.experts, "moe_router_topk": mixture.active, "moe_ffn_hidden_size": mixture.ffn,
            "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": mixture.shared_ffn or None,
        }  # fmt: skip
    text = logged(**{**same, **changed}).replace("new size: 51200", f"new size: {vocab}")
    return text + STEPS


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_log_of_the_given_model_is_read(name: str) -> None:
    given_model = ss.Model.of(name)
    assert isinstance(given_model, Transformer)
    for padding in (0, 768):
        found = row(_log_of(given_model, given_model.vocab + padding), given_model)
        assert found["step_time_ms"] == 20000.0


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama-3-8b", {"ffn_hidden_size": 11008}, "ffn_hidden_size=11008, but model='llama-3-8b' has 14336"),
        ("llama-3-8b", {"num_query_groups": 4}, "num_query_groups=4, but model='llama-3-8b' has 8"),
        ("llama-3-8b", {"group_query_attention": False}, "with num_attention_heads=32, but model='llama-3-8b' has 8"),
        ("llama-3-8b", {"num_experts": 8}, "num_experts=8, but model='llama-3-8b' has no experts"),
        ("llama-3-8b", {"kv_channels": 64}, "kv_channels=64, but"),
        ("mixtral-8x7b", {"num_experts": None}, "num_experts=None, but model='mixtral-8x7b' has experts"),
        ("mixtral-8x7b", {"moe_ffn_hidden_size": 512}, "moe_ffn_hidden_size=512, but"),
        ("mixtral-8x7b", {"moe_ffn_hidden_size": None, "ffn_hidden_size": 512}, "as experts ffn_hidden_size=512, but"),
        ("mixtral-8x7b", {"moe_router_topk": 1}, "moe_router_topk=1, but"),
        ("mixtral-8x7b", {"topk": 1}, "topk=1, but"),
        ("mixtral-8x7b", {"moe_shared_expert_intermediate_size": 4096}, "intermediate_size=4096, but .* has 0"),
        ("mixtral-8x7b", {"moe_layer_freq": 2}, "moe_layer_freq='2', but .* has experts in all of 32 layers"),
        ("mixtral-8x7b", {"moe_layer_freq": "([0]*30+[1]*2)"}, "moe_layer_freq=.*, but"),
        ("mixtral-8x7b", {"moe_layer_freq": [0, *[1] * 31]}, "moe_layer_freq=.*, but"),
        ("mixtral-8x7b", {"moe_layer_freq": "eval(1)"}, "moe_layer_freq=.*, but"),
        ("mixtral-8x7b", {"multi_latent_attention": True}, "states multi_latent_attention=True"),
    ],
)  # fmt: skip
def test_a_log_that_contradicts_the_given_model_is_refused_by_the_argument(
    name: str, changed: dict[str, Any], message: str
) -> None:
    given_model = ss.Model.of(name)
    assert isinstance(given_model, Transformer)
    with pytest.raises(SpecError, match=message):
        row(_log_of(given_model, given_model.vocab, **changed), given_model)


def test_another_vocabulary_than_the_given_model_s_is_refused() -> None:
    given_model = ss.Model.of("llama-3-8b")
    assert isinstance(given_model, Transformer)
    with pytest.raises(
        SpecError, match=r"padded_vocab_size=51200, but .* of 128256; give .*replace\(vocab=51200\)"
    ):
        row(_log_of(given_model, 51200), given_model)
    assert row(_log_of(given_model, 51200), given_model.replace(vocab=51200))["step_time_ms"] == 20000.0


def test_the_order_of_dense_layers_and_experts_is_read_in_each_of_its_forms() -> None:
    given_model = ss.Model.of("mixtral-8x7b")
    assert isinstance(given_model, Transformer)
    assert given_model.mixture is not None
    late = given_model.replace(mixture=given_model.mixture.replace(dense_layers=2))
    ffn = {"ffn_hidden_size": late.ffn}
    for same in ("([0]*2+[1]*30)", "[0]*2 + [1]*30", [0, 0, *[1] * 30], "[0, 0]+[1]*30"):
        assert row(_log_of(late, late.vocab, moe_layer_freq=same, **ffn), late)["step_time_ms"] == 20000.0
    with pytest.raises(SpecError, match="except the first 2"):
        row(_log_of(late, late.vocab, moe_layer_freq=1, **ffn), late)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 50}, "stage=50 with 2 pipeline stages does not divide 40 layers"),
        ({"num_layers_per_virtual_pipeline_stage": 3}, "stage=3 with 2 pipeline stages does not divide 40 layers"),
        ({"num_virtual_stages_per_pipeline_rank": 7}, "rank=7 with 2 pipeline stages does not divide 40 layers"),
        ({"num_layers_per_virtual_pipeline_stage": 4, "virtual_pipeline_model_parallel_size": 4}, "contradict each"),
        ({"num_virtual_stages_per_pipeline_rank": 2, "virtual_pipeline_model_parallel_size": 4}, "contradict each"),
    ],
)  # fmt: skip
def test_pipelines_that_cannot_exist_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        row(arguments(pipeline_model_parallel_size=2, data_parallel_size=2, **changed) + STEPS)


@pytest.mark.parametrize(
    ("stated", "window"),
    [("(127, 0)", 128), ("(127, 127)", 128), ("[127, 0]", 128), ("(-1, -1)", 0), ("(-1, 0)", 0)],
)
def test_a_causal_window_is_that_of_the_tokens_before(stated: str, window: int) -> None:
    assert row(arguments(window_size=stated) + STEPS)["model"].window == window


@pytest.mark.parametrize("stated", ["127", "(127)", "(a, 0)", "(127, 0, 1)"])
def test_a_window_that_is_no_pair_is_refused(stated: str) -> None:
    with pytest.raises(SpecError, match="window_size=.* is not a pair"):
        row(arguments(window_size=stated) + STEPS)


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_modules", "num_draft_heads"])
def test_one_layer_more_of_a_fork_is_not_the_same_as_none(name: str) -> None:
    with pytest.raises(SpecError, match=f"states {name}=1, which rows cannot express"):
        row(arguments(**{name: 1}) + STEPS)
    assert row(arguments(**{name: 0}, my_parallel_size=1) + STEPS)


def test_a_log_that_states_no_precision_is_refused() -> None:
    text = "\n".join(line for line in arguments().splitlines() if "bf16" not in line and "fp16" not in line)
    with pytest.raises(SpecError, match="neither bf16 nor fp16"):
        row(text + "\n" + STEPS)
