"""The command that starts Megatron-LM, and the base of rotary positions among its flags."""

from __future__ import annotations

import pytest

from shardscope.errors import SpecError
from shardscope.planner import plan
from shardscope.planner.trainer_config import trainer_config
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model

LLAMA, GPT = Model.of("llama-3-8b"), Model.of("gpt3-175b")


def test_megatron_gets_the_rotary_base_or_a_remark_where_it_is_unknown():
    layout = Layout(data=2, global_batch=8)
    known = trainer_config(LLAMA, layout, "megatron-core")
    assert "--rotary-base 500000 " in known.text
    assert "rotary-base" not in " ".join(known.remarks)
    unknown = trainer_config(LLAMA.replace(rotary_base=None), layout, "megatron-core")
    assert "rotary-base" not in unknown.text
    assert "Add --rotary-base if the model's is not 10,000." in unknown.remarks
    with pytest.raises(SpecError, match="rotary_base=0.5 is not an integer"):
        trainer_config(LLAMA.replace(rotary_base=0.5), layout, "megatron-core")
    assert "rotary-base" not in trainer_config(GPT, layout, "megatron-core").text


def test_a_plan_writes_the_command_that_starts_megatron_on_each_node():
    plans = plan("llama-3-8b", Cluster.of("h100-80gb", nodes=2), global_batch=64, fix={"tensor": 2})
    config = plans.trainer_config()
    assert config.launch.replace(" \\\n", " ") == (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint $MASTER_ADDR:29500 pretrain_gpt.py"
    )
    assert max(map(len, config.command.splitlines())) < 45  # each line fits beside the remarks
    assert config.command == f"{config.launch} \\\n{config.text}"
    alone = plan("llama-3-8b", Cluster.of("h100-80gb"), global_batch=64, fix={"tensor": 1, "context": 1})
    assert alone.trainer_config().launch == "torchrun \\\n--nnodes 1 --nproc-per-node 8 \\\npretrain_gpt.py"
    sharded = plan(
        "llama-3-8b", Cluster.of("h100-80gb"), global_batch=64, software="torchtitan"
    ).trainer_config()
    assert sharded.command == sharded.text
