"""What is said to names that are not known here: the one that is meant, not the one that is spelt alike."""

from __future__ import annotations

import re

import pytest

from shardscope.aliases import ALIASES
from shardscope.errors import unknown_name
from shardscope.spec import Optimizer
from shardscope.spec.compression import Compression
from shardscope.spec.job_parts import PRECISIONS
from shardscope.spec.registry import names
from shardscope.spec.strategy import strategies
from shardscope.tuning.objectives import OBJECTIVES
from shardscope.tuning.pruning.pruners import PRUNERS
from shardscope.tuning.samplers import SAMPLERS

VALID = {
    "sampler": SAMPLERS, "pruner": PRUNERS, "strategy": strategies(), "objective": OBJECTIVES,
    "optimizer": names(Optimizer), "compression": names(Compression),
    "precision": PRECISIONS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("sampler", "bayes", "did you mean 'tpe', or 'gp' if trials are expensive?"),
        ("sampler", "Bayesian", "did you mean 'tpe', or 'gp'"),
        ("sampler", "tpp", "did you mean 'tpe'?"),
        ("precision", "BF16", "did you mean 'bf16-mixed'?"),
        ("sampler", "pbt", "use ss.train_population; valid names are"),
        ("pruner", "ASHA", "did you mean 'successive-halving', or promote=3"),
        ("optimizer", "Adam", "did you mean 'adamw'?"),
        ("space: optimizer", "adam", "did you mean 'adamw'?"),
        ("optimizer", "rmsprop", "is not known; valid names are"),
        ("strategy", "ddp", "did you mean 'all-reduce'"),
        ("strategy", "allreduce", "did you mean 'all-reduce'?"),
        ("strategy", "FSDP", "did you mean 'zero-3'?"),
        ("strategy", "zero3", "did you mean 'zero-3'?"),
        ("strategy", "DiLoCo", "did you mean compression='local-sgd'?"),
        ("compression", "1bit", "did you mean 'sign', 'onebit-adam' or 'onebit-lamb'?"),
        ("compression", "PowerSGD", "did you mean 'powersgd'?"),
        ("objective", "accuracy", "did you mean 'error'"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_what_is_meant(field: str, value: str, said: str) -> None:
    assert said in str(unknown_name(field, value, VALID[field.rpartition(" ")[2]]))


def test_what_is_suggested_is_there_and_no_valid_name_is_taken_for_another() -> None:
    for field, hints in ALIASES.items():
        for hint, others in hints.items():
            own = "compression" if hint.startswith("compression=") else field
            suggested = re.findall(r"'([^']+)'", hint.replace("torch's", ""))
            assert {name.partition(":")[0] for name in suggested} <= {*VALID[own]}, hint
            assert not set(others.split()) & {*VALID[field]}


def test_where_a_field_has_other_names_only_those_are_suggested() -> None:
    assert "did you mean 'adam'?" in str(unknown_name("optimizer", "Adam", ["adam", "sgd"]))
    assert "did you mean 'fp16'?" in str(unknown_name("compression", "half", ["fp16", "topk"]))
    assert "did you mean 'int8' or 'int4'?" in str(unknown_name("compression", "quantize", ["int8", "int4"]))
    assert "did you mean 'ring'?" in str(unknown_name("strategy", "ddp", ["ring", "single"]))
