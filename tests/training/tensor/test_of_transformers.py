"""Models of the package transformers, divided by the plans that they ship, and its `Conv1D`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import context_for
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, TOLERANCE, job, mean_losses, relative_difference, train
from prediction.ranks_of import EVERY_STEP, hold_traffic, run_on
from shardscope.prediction.traced import traced
from shardscope.training.context import RankContext
from shardscope.training.tensor import Cut, TensorAxis, TensorSplit
from shardscope.training.tensor.of_transformers import shipped_plan

transformers = pytest.importorskip("transformers")

_LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 256, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2_PLAN = {
    "*.attn.c_attn": "columns:3", "*.attn.c_proj": "rows", "*.mlp.c_fc": "columns", "*.mlp.c_proj": "rows",
    "*.h.*": "sequence",
}  # fmt: skip
PLANS = {"llama": None, "qwen3": None, "gpt2": _GPT2_PLAN}


class Scores(nn.Module):
    """A model of transformers whose output is its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes = _GPT2 if kind == "gpt2" else _LLAMA
        config = transformers.AutoConfig.for_model(kind, **sizes)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return scores


def job_of(kind: str, *, sequence_parallel: bool = False, data: str = "ring", **changes: Any) -> ss.Job:
    strategy = ss.Strategy(
        "mesh", data=data, tensor=2, tensor_plan=PLANS[kind], sequence_parallel=sequence_parallel
    )
    fields = {"model": partial(Scores, kind), "strategy": strategy, "world_size": 2, "batch": ss.Batch(8)}
    return job(**{**fields, "optimizer": OPTIMIZERS["adamw"], **changes})


def _alone(ours: ss.Job, context: RankContext) -> Any:
    return train(ours, context_for(ours, context))


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", PLANS)
def test_a_model_divided_by_its_own_plan_follows_one_process(
    pool: RankPool, tmp_path: Path, kind: str, sequence_parallel: bool
) -> None:
    ours = job_of(kind, sequence_parallel=sequence_parallel)
    results = pool.run(partial(train, ours), tmp_path)
    alone = ours.replace(strategy="single", world_size=1)
    losses, parameters = pool.run(partial(_alone, alone), tmp_path)[0]
    assert mean_losses(results) == pytest.approx(losses, rel=TOLERANCE["fp64"])
    for _, found in results:
        assert relative_difference(found, parameters) < TOLERANCE["fp64"]


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_parts_of_sequences_in_a_shipped_plan_send_what_is_predicted(pool: RankPool, tmp_path: Path) -> None:
    ours = job_of("qwen3", sequence_parallel=True, data="zero-1", world_size=4, steps=3, record=EVERY_STEP)
    trace = traced(ours).table.step
    assert trace is not None
    assert hold_traffic(ours, trace, run_on(pool, ours, tmp_path)) > 0


def _model(kind: str, **sizes: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **{**_LLAMA, **sizes})
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def test_a_shipped_plan_becomes_rules_for_the_layers_that_the_model_has() -> None:
    rules = shipped_plan(_model("qwen3")).rules  # type: ignore[union-attr]
    layer = "model.layers.*"
    assert rules == {
        **{f"{layer}.self_attn.{name}_proj": "columns" for name in "qkv"},
        **{f"{layer}.self_attn.{name}_norm": "shared" for name in "qk"},
        f"{layer}.self_attn.o_proj": "rows",
        **{f"{layer}.mlp.{name}_proj": "columns" for name in ("gate", "up")},
        f"{layer}.mlp.down_proj": "rows",
        f"{layer}.self_attn": "gathered",
        f"{layer}.mlp": "gathered",
        layer: "sequence",
    }
    within = shipped_plan(nn.ModuleDict({"inner": _model("llama")}))
    assert within is not None
    assert "inner.model.layers.*.self_attn.o_proj" in within.rules
    assert shipped_plan(nn.Linear(2, 2)) is None


def test_a_shipped_plan_with_an_unknown_style_is_refused() -> None:
    model = _model("mixtral", num_local_experts=2)
    with pytest.raises(
        ss.SpecError, match=r"divides 'model\.layers.* by the style '\w+', which is not available"
    ):
        shipped_plan(model)


def test_a_transposed_layer_is_divided_along_its_other_dimension() -> None:
    model = nn.ModuleDict(
        {"up": transformers.pytorch_utils.Conv1D(12, 6), "down": transformers.pytorch_utils.Conv1D(6, 12)}
    )
    split = TensorSplit(TensorAxis(2), ss.TensorPlan({"up": "columns:3", "down": "rows"}))
    split.divide(model)
    assert split.cuts == {"up.weight": Cut(1, 3), "up.bias": Cut(0, 3), "down.weight": Cut(0)}
    assert [tuple(p.shape) for p in model.parameters()] == [(6, 6), (6,), (6, 6), (6,)]
