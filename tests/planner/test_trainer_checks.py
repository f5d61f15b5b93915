"""What a plan writes for a trainer passes that trainer's own checks, restated here from its sources."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.planner.trainer_config import trainer_config
from shardscope.spec.model import Mixture, Transformer

GQA = ss.Model.transformer(
    layers=8, hidden=1024, heads=16, kv_heads=4, vocab=32000, seq=2048, positions="rotary"
)
MODELS = {
    "gqa": GQA,
    "tied": GQA.replace(tied=True),
    "odd sequence": GQA.replace(seq=2052),
    "experts": GQA.replace(mixture=Mixture(experts=8, active=2, ffn=2048)),
    "window": GQA.replace(window=512),
}
CLUSTER = ss.Cluster.of("h100-80gb", nodes=2)


def flags_of(text: str) -> dict[str, Any]:
    words = text.replace("\\\n", " ").split("--")
    pairs = [word.strip().partition(" ") for word in words if word.strip()]
    return {name: value.strip() or True for name, _, value in pairs}


def torchtitans_complaint(model: Transformer, text: str) -> str:
    """`Decoder.Config.update_from_config`, `Trainer.Config` and `Trainer` of torchtitan b5bcd76, on what is written."""
    flags = flags_of(text)
    tensor, context, pipeline, expert = (
        int(flags.get(f"parallelism.{name}", 1))
        for name in (
            "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree",
        )
    )  # fmt: skip
    is_sequence = "parallelism.no_enable_sequence_parallel" not in flags
    parts = (tensor if is_sequence else 1) * (2 * context if context > 1 else 1)
    checks = {
        "tied": model.tied and pipeline > 1,
        "heads": model.heads % tensor or model.kv_heads % tensor,
        "experts": model.mixture is not None and model.mixture.experts % expert,
        "tokens": int(flags["training.num_tokens_per_microbatch_per_dp_rank"]) % parts,
        "graphs": (pipeline > 1 or expert > 1) and "training.disable_cuda_graphs" not in flags,
    }
    return next((name for name, fails in checks.items() if fails), "")


def megatrons_complaint(model: Transformer, text: str) -> str:
    """`validate_args`, `OptimizerConfig`, `get_megatron_optimizer` and `MoELayer` of Megatron-LM d98e8a6."""
    flags = flags_of(text)
    tensor, context = (int(flags[f"{name}-parallel-size"]) for name in ("tensor-model", "context"))
    is_adam = flags["optimizer"] == "adam"
    checks = {
        "sequence": context > 1 and int(flags["seq-length"]) % (2 * context),
        "offload": "use-precision-aware-optimizer" in flags
        and not (is_adam and "use-distributed-optimizer" in flags),
        "distributed optimizer": "use-distributed-optimizer" in flags and flags["optimizer"] == "sgd",
        "emerging": flags["optimizer"] == "muon" and "fp16" in flags,
        "experts": "num-experts" in flags and tensor > 1 and "sequence-parallel" not in flags,
        "window": "window-size" in flags and context > 1,
        "heads": int(flags.get("num-query-groups", model.heads)) % tensor
        and tensor % int(flags.get("num-query-groups", model.heads)),
    }
    return next((name for name, fails in checks.items() if fails), "")


COMPLAINTS = {
    "torchtitan": torchtitans_complaint,
    "fsdp2": torchtitans_complaint,
    "megatron-core": megatrons_complaint,
}
DEGREES = [
    (8, 1, 1, 1),
    (4, 4, 1, 1),
    (1, 8, 1, 2),
    (1, 16, 1, 1),
    (4, 1, 4, 1),
    (2, 2, 2, 2),
    (4, 1, 1, 4),
    (1, 2, 8, 1),
]


def layouts() -> list[ss.Layout]:
    """All kinds of layouts, most of which some trainer refuses."""
    found = []
    for (data, tensor, pipeline, context), optimizer, offload, zero, sequence in itertools.product(
        DEGREES, ("adamw", "sgd", "muon"), ("none", "optimizer"), (0, 1, 3), (False, True)
    ):
        if sequence and tensor == 1:
            continue
        found.append(
            ss.Layout(
                data=data, tensor=tensor, pipeline=pipeline, context=context, global_batch=32, zero=zero,
                optimizer=optimizer, offload=offload, sequence_parallel=sequence,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("software", COMPLAINTS)
def test_whatever_is_written_passes_the_trainers_checks_and_the_rest_is_refused(
    software: str, name: str
) -> None:
    model, written = MODELS[name], 0
    for layout in layouts():
        try:
            text = trainer_config(model, layout, software).text
        except SpecError as error:
            assert "\n" not in str(error)
            continue
        written += 1
        assert not COMPLAINTS[software](model, text), layout
    assert written


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("software", ["torchtitan", "megatron-core"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_every_plan_for_a_trainer_can_be_written_for_it(software: str, optimizer: str, name: str) -> None:
    if software == "torchtitan" and optimizer == "sgd":
        pytest.skip("torchtitan has no SGD")
    plans = ss.plan(MODELS[name], CLUSTER, global_batch=32, software=software, optimizer=optimizer, top=60)
    assert len(plans)
    for plan in plans:
        refused = ""
        try:
            text = plans.trainer_config(plan.rank).text
        except SpecError as error:
            refused = str(error)
        unwritten = "which Shardscope does not write" in refused or "are not written as flags" in refused
        if refused:
            assert unwritten or "which Megatron-LM expects" in refused, (plan.layout, refused)
        else:
            assert not COMPLAINTS[software](MODELS[name], text), plan.layout


@pytest.mark.parametrize(
    ("software", "layout", "model", "message"),
    [
        ("torchtitan", {"tensor": 8, "data": 2}, "gqa", "tensor=8 with 4 key-value heads"),
        ("fsdp2", {"tensor": 16, "zero": 3}, "gqa", "torchtitan refuses tensor=16 with 4 key-value heads"),
        ("torchtitan", {"pipeline": 2, "data": 2}, "tied", "pipelines with tied embeddings"),
        ("fsdp2", {"pipeline": 4, "data": 2, "zero": 2}, "tied", "pipelines with tied embeddings"),
        ("torchtitan", {"context": 4, "zero": 3}, "odd sequence", "context=4 with 2052 tokens"),
        ("megatron-core", {"context": 4}, "odd sequence", "tokens, which are not a multiple of 2 x context"),
        ("megatron-core", {"data": 2, "zero": 1, "offload": "optimizer", "optimizer": "muon"}, "gqa", "' with muon"),
        ("megatron-core", {"data": 2, "zero": 1, "optimizer": "sgd"}, "gqa", "ZeRO 1 with sgd"),
        ("megatron-core", {"data": 2, "optimizer": "muon", "precision": "fp16-mixed"}, "gqa", "'muon' with fp16-mixed"),
        ("megatron-core", {"data": 2, "tensor": 2}, "experts", "experts needs sequence parallelism with tensor=2"),
        ("megatron-core", {"context": 2}, "window", "context=2 with a window of 512 tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_that_the_trainer_refuses_is_refused_by_name(
    software: str, layout: dict[str, Any], model: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        trainer_config(MODELS[model], ss.Layout(**{"global_batch": 16, **layout}), software)


def test_an_axis_that_the_caller_fixes_is_searched_as_given() -> None:
    plans = ss.plan(GQA, CLUSTER, global_batch=32, software="torchtitan", fix={"tensor": 8})
    assert plans.best.layout.tensor == 8
    assert "tensor=8 with 4 key-value heads" in plans.caveat
