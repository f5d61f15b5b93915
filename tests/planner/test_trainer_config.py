"""Settings for trainers: Megatron-LM's flags are read back by the reader of its logs, and refusals name a way out."""

from __future__ import annotations

import argparse
import json
import shlex

import pytest

from shardscope.analytic.memory import FRAMEWORKS
from shardscope.errors import SpecError
from shardscope.measure.calibrate.logs import row_of_log
from shardscope.planner import plan
from shardscope.planner.trainer_config import trainer_config
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Mixture, Model
from shardscope.spec.units import gib_text

LLAMA, GPT = Model.of("llama-3-8b"), Model.of("gpt3-175b")
LAYOUTS = [
    (LLAMA, Layout(data=4, tensor=2, global_batch=64, micro_batch=2, sequence_parallel=True, zero=1)),
    (LLAMA, Layout(data=2, pipeline=4, global_batch=32, schedule="interleaved", virtual_stages=2)),
    (GPT, Layout(data=2, tensor=8, pipeline=8, global_batch=32, recompute="full", precision="fp16-mixed")),
    (GPT, Layout(tensor=8, pipeline=8, context=2, global_batch=32, recompute="full", recompute_layers=5)),
    (LLAMA, Layout(data=8, global_batch=8, recompute="selective", precision="fp8-mixed", zero=1)),
    (LLAMA.replace(window=4096), Layout(data=8, global_batch=8, zero=1)),
    (LLAMA.replace(window=512, full_attention_every=4, qk_norm=True), Layout(data=8, global_batch=8, zero=1)),
]


INT, FLOAT, ON = {"type": int}, {"type": float}, {"action": "store_true"}
MEGATRON = {
    **dict.fromkeys(
        (
            "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
            "expert-model-parallel-size", "num-virtual-stages-per-pipeline-rank", "micro-batch-size",
            "global-batch-size", "recompute-num-layers", "num-distributed-optimizer-instances", "num-layers",
            "hidden-size", "num-attention-heads", "kv-channels", "num-query-groups", "ffn-hidden-size", "seq-length",
            "max-position-embeddings", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
            "moe-shared-expert-intermediate-size", "window-attn-skip-freq", "rotary-base",
        ),
        INT,
    ),
    **dict.fromkeys(
        (
            "sequence-parallel", "use-distributed-optimizer", "bf16", "fp16", "optimizer-cpu-offload",
            "use-precision-aware-optimizer",
            "group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear",
            "add-qkv-bias", "qk-layernorm", "accumulate-allreduce-grads-in-fp32", "cross-entropy-loss-fusion",
            "overlap-grad-reduce", "overlap-param-gather", "moe-grouped-gemm",
        ),
        ON,
    ),
    "hidden-dropout": FLOAT,
    "attention-dropout": FLOAT,
    "moe-layer-freq": {},
    # The other implementation, te, is one that this release refuses to start with.
    "cross-entropy-fusion-impl": {"choices": ["native"]},
    "moe-token-dispatcher-type": {"choices": ["allgather", "alltoall", "flex"], "default": "allgather"},
    "window-size": {},
    "recompute-granularity": {"choices": ["full", "selective"]},
    "recompute-method": {"choices": ["uniform", "block"]},
    "fp8-format": {"choices": ["e4m3", "hybrid"]},
    "attention-backend": {"choices": ["flash", "fused", "unfused", "local", "auto"]},
    "optimizer": {"choices": ["adam", "sgd", "muon", "lion", "soap", "adaptive_muon"]},
    "normalization": {"choices": ["LayerNorm", "RMSNorm"]},
    "position-embedding-type": {"choices": ["learned_absolute", "rope", "mrope", "yarn", "relative", "none"]},
}  # fmt: skip
"""Flags of Megatron-LM at d98e8a6 (22 August 2026): `megatron/training/arguments.py` and `TransformerConfig`."""
COUNT = {"type": int}
TORCHTITAN = {
    **dict.fromkeys(
        (
            "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
            "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree",
            "parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_layers_per_stage",
            "parallelism.pipeline_parallel_first_stage_less_layers",
            "parallelism.pipeline_parallel_last_stage_less_layers", "parallelism.expert_parallel_degree",
            "training.max_context_length",
            "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step",
        ),
        COUNT,
    ),
    "parallelism.num_pp_microbatches": {"type": int, "default": 1},
    # tyro negates a flag by no_; of the two actions, the first has the default of the trainer.
    "parallelism.no_enable_sequence_parallel": {
        "action": "store_false", "dest": "parallelism.enable_sequence_parallel",
    },
    "parallelism.enable_sequence_parallel": ON,
    "compile.enable": ON,
    "compile.no_enable": {"action": "store_false", "dest": "compile.enable"},
    "parallelism.fsdp_reshard_after_forward": {"choices": ["default", "always", "never"]},
    "parallelism.pipeline_parallel_schedule": {},
    "training.dtype": {"choices": ["bfloat16", "float32"]},
    "training.mixed_precision_param": {"choices": ["bfloat16", "float32"]},
    "training.mixed_precision_reduce": {"choices": ["float32"]},
    "training.enable_cpu_offload": ON,
    "training.disable_cuda_graphs": ON,
}  # fmt: skip
"""Flags of torchtitan at b5bcd76 (21 August 2026): `torchtitan/config/configs.py`, with its defaults where a flag
is not always written."""


def parsed(config):
    """The settings as a parser with the trainer's own flags reads them; it refuses any other."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, how in (MEGATRON if config.trainer.startswith("Megatron") else TORCHTITAN).items():
        parser.add_argument(f"--{name}", **{"dest": name, **how})
    words = shlex.split(config.text.replace("\\\n", " "))
    return vars(parser.parse_args(words))


def arguments(config):
    """The settings as Megatron-LM keeps them, by the name of the argument."""
    words = [line.rstrip(" \\").split(maxsplit=1) for line in config.text.splitlines()]
    return {word[0][2:].replace("-", "_"): word[1] if len(word) > 1 else "True" for word in words}


def log(config, *, ranks, vocab):
    """What Megatron-LM prints when it is started with these flags: its arguments, and eight steps."""
    known = arguments(config)
    known["world_size"] = str(ranks)
    known["add_bias_linear"] = str("disable_bias_linear" not in known)
    known["virtual_pipeline_model_parallel_size"] = known.pop("num_virtual_stages_per_pipeline_rank", "None")
    known["fp8"] = known.pop("fp8_format", "None")
    known["transformer_impl"] = "transformer_engine"
    lines = [
        "------------------------ arguments ------------------------",
        *(f"  {name} ....... {value}" for name, value in known.items()),
        "-------------------- end of arguments ---------------------",
    ]
    step = "iteration {}/ 9 | elapsed time per iteration (ms): 5.0 |"
    return "\n".join(
        [*lines, f" > padded vocab (size: 1) (new size: {vocab})", *map(step.format, range(1, 9))]
    )


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_megatrons_flags_are_read_back_as_the_same_layout_and_model(model, layout):
    config = trainer_config(model, layout, "megatron-core")
    assert parsed(config)["global-batch-size"] == layout.global_batch
    row = dict(row_of_log(log(config, ranks=layout.num_devices, vocab=model.vocab), "log"))
    found = row.pop("model")
    fields = {name: row[name] for name in Layout.model_fields if name in row}
    assert Layout(**fields) == layout
    assert found.num_positions in (
        model.num_positions,
        model.seq,
    )  # 0 stands for as many as tokens in a sequence
    own = {"name": model.name, "source": model.source, "num_positions": model.num_positions}
    own["rotary_base"] = model.rotary_base  # has no effect on predictions, so logs are not read for it
    assert found.num_params == model.num_params
    assert found.replace(**own) == model
    assert f"form {layout.data} replica" in config.remarks[1]


def test_experts_and_groups_of_shards_have_flags():
    mixture = Model.of("mixtral-8x7b")
    known = arguments(
        trainer_config(mixture, Layout(data=8, expert=4, zero=1, shard=4, global_batch=8), "megatron")
    )
    assert (known["num_experts"], known["moe_router_topk"], known["expert_model_parallel_size"]) == (
        "8",
        "2",
        "4",
    )
    assert known["num_distributed_optimizer_instances"] == "2"


@pytest.mark.parametrize(
    ("layout", "software", "told"),
    [
        (Layout(data=8, expert=8, zero=1, shard=4, global_batch=8), "megatron", "1 replica of each expert"),
        (Layout(data=4, tensor=2, expert=4, global_batch=8), "megatron", "use sequence_parallel=True"),
        (Layout(data=8, expert=8, global_batch=8), "torchtitan", "does not divide the 1 rank over"),
        (Layout(data=8, expert=8, zero=3, shard=4, global_batch=8), "torchtitan", "divide the 4 ranks over"),
        (
            Layout(data=4, tensor=2, expert=4, zero=3, global_batch=8),
            "torchtitan",
            "use tensor=1 or expert=1",
        ),
    ],
)
def test_experts_that_a_trainer_would_split_otherwise_are_refused(layout, software, told):
    with pytest.raises(SpecError, match=told):
        trainer_config(Model.of("mixtral-8x7b"), layout, software)


def test_megatron_exchanges_tokens_and_overlaps_messages_as_predicted():
    layout = Layout(data=4, tensor=2, sequence_parallel=True, expert=4, zero=1, global_batch=8)
    known = parsed(trainer_config(Model.of("mixtral-8x7b"), layout, "megatron-core"))
    assert known["moe-token-dispatcher-type"] == "alltoall"
    assert known["moe-grouped-gemm"]
    assert known["overlap-grad-reduce"]
    assert known["overlap-param-gather"]
    alone = parsed(trainer_config(LLAMA, Layout(tensor=8, global_batch=1), "megatron-core"))
    assert not alone["overlap-grad-reduce"]


def test_megatrons_remarks_say_what_no_flag_can():
    """The kernel of the loss that predictions assume is refused, so the remark has the memory of the other one."""
    assumed = FRAMEWORKS["megatron-core"].logits_bytes
    layout = Layout(data=2, tensor=2, pipeline=2, sequence_parallel=True, micro_batch=2, global_batch=64)
    told = " ".join(trainer_config(LLAMA, layout, "megatron-core").remarks)
    more = (6 - assumed) * 2 * LLAMA.seq * LLAMA.vocab / 2
    assert f"{gib_text(more)} on each device of the last stage" in told
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in told
    assert "--tp-comm-overlap does this." in told
    alone = " ".join(trainer_config(LLAMA, Layout(data=8, global_batch=8), "megatron-core").remarks)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in alone
    assert "--tp-comm-overlap" not in alone
    assert "--train-iters" in alone


def test_only_megatron_has_a_setting_for_the_number_of_layers_to_recompute():
    layout = Layout(data=8, zero=3, recompute="full", recompute_layers=3, global_batch=8)
    for software in ("torchtitan", "fsdp2", "deepspeed"):
        assert "only the first 3 layers" in " ".join(trainer_config(LLAMA, layout, software).remarks)
        every = trainer_config(LLAMA, layout.replace(recompute_layers=0), software)
        assert "only the first" not in " ".join(every.remarks)
    config = trainer_config(LLAMA, layout.replace(zero=1), "megatron-core")
    known = parsed(config)
    assert (known["recompute-method"], known["recompute-num-layers"]) == ("block", 3)
    assert "only the first" not in " ".join(config.remarks)


def test_megatrons_offload_comes_with_the_optimizer_that_it_needs():
    layout = Layout(data=2, zero=1, offload="optimizer", global_batch=2)
    known = parsed(trainer_config(LLAMA, layout, "megatron"))
    assert known["optimizer-cpu-offload"]
    assert known["use-precision-aware-optimizer"]
    assert known["use-distributed-optimizer"]


def test_dense_layers_before_the_experts_are_one_word_of_the_shell():
    mixture = Mixture(experts=4, active=2, ffn=64, dense_layers=1)
    model = LLAMA.replace(layers=4, mixture=mixture)
    assert (
        parsed(trainer_config(model, Layout(global_batch=1), "megatron"))["moe-layer-freq"] == "([0]*1+[1]*3)"
    )


@pytest.mark.parametrize("software", ["torchtitan", "fsdp2"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, pipeline=4, zero=3, global_batch=64),
        Layout(data=2, pipeline=2, zero=0, global_batch=64, micro_batch=4, schedule="zbv", virtual_stages=2),
        Layout(data=2, tensor=4, zero=3, global_batch=64),
        Layout(data=2, tensor=4, zero=2, sequence_parallel=True, global_batch=64, micro_batch=2),
        Layout(data=4, context=2, zero=3, shard=4, global_batch=64),
        Layout(data=8, global_batch=64),
    ],
    ids=["pipeline", "zbv", "tensor", "sequence", "context", "data"],
)
def test_torchtitan_runs_the_layout_whatever_its_defaults_are(layout, software):
    """The layout as `trainer.py` and `parallel_dims.py` of torchtitan derive it from the flags and its defaults."""
    known = parsed(trainer_config(LLAMA, layout, software))
    degree = {
        name: known[f"parallelism.{name}_degree"]
        for name in (
            "data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel",
            "pipeline_parallel",
        )
    }  # fmt: skip
    replicas = degree["data_parallel_replicate"] * degree["data_parallel_shard"]
    assert replicas == layout.data
    in_pipeline = known["parallelism.num_pp_microbatches"] if degree["pipeline_parallel"] > 1 else 1
    tokens = known["training.num_tokens_per_microbatch_per_dp_rank"]
    fills, rest = divmod(known["training.num_tokens_per_train_step"], tokens * in_pipeline * replicas)
    assert rest == 0
    assert tokens == layout.micro_batch * known["training.max_context_length"]
    assert (fills, in_pipeline) == (
        (1, layout.num_micro_batches) if layout.pipeline > 1 else (layout.num_micro_batches, 1)
    )
    owners = degree["data_parallel_shard"] * degree["context_parallel"]
    assert owners == ((layout.shard or layout.data * layout.context) if layout.zero else 1)
    if layout.tensor > 1:
        assert known["parallelism.enable_sequence_parallel"] == layout.sequence_parallel
    assert known["compile.enable"] == (FRAMEWORKS[software].logits_bytes < FRAMEWORKS["fsdp2"].logits_bytes)


def test_torchtitan_shards_as_the_layout_does():
    hybrid = Layout(data=8, zero=3, shard=4, pipeline=2, schedule="zbv", virtual_stages=2, global_batch=64)
    config = trainer_config(LLAMA, hybrid, "fsdp")
    assert parsed(config)["training.mixed_precision_param"] == "bfloat16"
    assert parsed(config)["parallelism.data_parallel_shard_degree"] == 4
    known = arguments(config)
    named = {name.removeprefix("parallelism."): value for name, value in known.items()}
    assert (named["data_parallel_replicate_degree"], named["data_parallel_shard_degree"]) == ("2", "4")
    assert named["fsdp_reshard_after_forward"] == "always"
    assert (named["pipeline_parallel_schedule"], named["pipeline_parallel_layers_per_stage"]) == (
        "ZBVZeroBubble",
        "8",
    )


def test_deepspeeds_json_has_the_batch_the_stage_and_what_is_offloaded():
    layout = Layout(data=8, zero=3, offload="states", global_batch=64, micro_batch=2)
    config = trainer_config(LLAMA, layout)
    found = json.loads(config.text)
    assert config.trainer.startswith("DeepSpeed")
    assert found["train_batch_size"] == (
        8 * found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    )
    zero = found["zero_optimization"]
    assert set(zero) == {
        "stage", "reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size",
        "offload_optimizer", "offload_param",
    }  # fmt: skip
    assert zero["stage"] == 3
    assumed = FRAMEWORKS["deepspeed"]
    assert zero["reduce_bucket_size"] == assumed.bucket_elements
    assert zero["stage3_max_live_parameters"] + zero["stage3_prefetch_bucket_size"] == assumed.live_elements
    assert found["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "DeepSpeedCPUAdam" in config.remarks[-1]
    other = json.loads(trainer_config(LLAMA, layout.replace(optimizer="sgd")).text)
    assert other["zero_allow_untested_optimizer"]
    assert not other["zero_force_ds_cpu_optimizer"]


@pytest.mark.parametrize(
    ("layout", "software", "told"),
    [
        (
            Layout(pipeline=2, schedule="zbv", virtual_stages=2, global_batch=8),
            "megatron-core",
            "plan with software='megatron-core' and leave these axes out of fix",
        ),
        (Layout(data=2, zero=3, global_batch=2), "megatron-core", "does not support ZeRO 3"),
        (Layout(context=2, global_batch=2), "torchtitan", "use zero=2 or 3"),
        (
            Layout(data=3, context=2, zero=3, shard=3, global_batch=3),
            "torchtitan",
            "use shard=0 or a multiple of 2",
        ),
        (Layout(data=2, zero=1, global_batch=2), "fsdp2", "plan with software='torchtitan'"),
        (
            Layout(offload="activations"),
            "deepspeed",
            "does not support offload='activations' without recompute='full' of all layers; to search only",
        ),
        (
            Layout(data=2, global_batch=2, recompute="full", recompute_layers=4, offload="activations"),
            "deepspeed",
            "without recompute='full' of all layers",
        ),
        (Layout(tensor=2), "deepspeed", r"fix=\{'tensor': 1\}"),
        (
            Layout(data=16, zero=3, shard=8, global_batch=16),
            "deepspeed",
            "support ZeRO over 8 of 16 ranks; to search",
        ),
        (
            Layout(data=2, offload="states", global_batch=2),
            "deepspeed",
            "does not support offload='states' below zero=3",
        ),
        (Layout(pipeline=3, global_batch=6), "megatron-core", "not a multiple of 3 stages"),
        (Layout(offload="optimizer"), "megatron-core", "does not support offload='optimizer' below zero=1"),
        (Layout(precision="fp16"), "torchtitan", "use one of fp32, bf16-mixed"),
        (Layout(), "nemo", "cannot be written yet; use one of megatron-core"),
    ],
)
def test_what_a_trainer_cannot_run_is_refused_with_a_way_out(layout, software, told):
    with pytest.raises(SpecError, match=told):
        trainer_config(LLAMA, layout, software)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"norms_per_layer": 4}, "has norms_per_layer=4, which"),
        (
            {"norms_per_layer": 1, "head_bias": True},
            "has a bias in the output projection, norms_per_layer=1, which",
        ),
        ({"qk_norm": "width"}, "weights for each head"),
        ({"norm": "unweighted"}, "norms without weights"),
        ({"attention_sinks": True}, "attention sinks"),
        ({"positions": "alibi", "embedding_norm": True}, "a norm after the embedding, positions='alibi'"),
        ({"qkv_bias": True, "out_bias": True}, "attention biases"),
        ({"bias": True, "qkv_bias": False}, "attention biases"),
    ],
)
def test_a_model_with_parts_beyond_the_flags_is_refused_by_their_names(fields, told):
    with pytest.raises(SpecError, match=told):
        trainer_config(LLAMA.replace(**fields), Layout(), "megatron-core")


@pytest.mark.parametrize("software", ["deepspeed", "torchtitan"])
def test_a_plan_that_fits_only_with_offloading_is_one_that_its_trainer_runs(software):
    fix = {"offload": "states", "tensor": 1, "pipeline": 1, "context": 1}
    plans = plan(
        Model.of("llama-3-70b"), Cluster.of("a100-80gb", nodes=2), software=software, fix=fix, top=None
    )
    assert len(plans) > 2
    assert all(plans.trainer_config(rank + 1).text for rank in range(len(plans)))


def test_all_plans_for_deepspeed_are_layouts_that_its_json_describes():
    """The layout as DeepSpeed derives it: without other settings, ZeRO shards over all ranks (`zero/config.py`)."""
    cluster = Cluster.of("a100-80gb", nodes=2)
    offloads = {
        (False, 0): "none", (False, 1): "optimizer", (False, 2): "states", (True, 0): "activations", (True, 2): "all",
    }  # fmt: skip
    fix = {"tensor": 1, "pipeline": 1, "context": 1, "offload": [*offloads.values()]}
    plans = plan(LLAMA, cluster, software="deepspeed", fix=fix, global_batch=64, top=None)
    assert {one.layout.zero for one in plans} == {1, 2, 3}
    assert {one.layout.offload for one in plans} == {*offloads.values()}
    for rank, one in enumerate(plans, 1):
        found = json.loads(plans.trainer_config(rank).text)
        zero, micro = found["zero_optimization"], found["train_micro_batch_size_per_gpu"]
        replicas, rest = divmod(found["train_batch_size"], micro * found["gradient_accumulation_steps"])
        assert (replicas, rest) == (cluster.num_devices, 0)
        assert not {"zero_hpz_partition_size", "mics_shard_size"} & {*zero}
        told = Layout(
            data=replicas, zero=zero["stage"], micro_batch=micro, global_batch=found["train_batch_size"],
            offload=offloads["activation_checkpointing" in found, sum(key.startswith("offload_") for key in zero)],
        )  # fmt: skip
        is_told = any(
            "deepspeed.checkpointing.configure(" in text for text in plans.trainer_config(rank).remarks
        )
        assert is_told == ("activation_checkpointing" in found)
        said = ("data", "zero", "shard", "micro_batch", "global_batch", "offload")
        assert all(getattr(told, name) == getattr(one.layout, name) for name in said)


def test_a_plan_gives_the_settings_of_its_framework():
    shipped = {"schedule": ["1f1b", "interleaved"]}
    plans = plan(LLAMA, Cluster.of("h100-80gb", nodes=1, per_node=8), fix=shipped)
    known = arguments(plans.trainer_config())
    assert known["tensor_model_parallel_size"] == str(plans.best.layout.tensor)
    assert known["micro_batch_size"] == str(plans.best.layout.micro_batch)
    with pytest.raises(SpecError, match="rank=0"):
        plans.trainer_config(0)
