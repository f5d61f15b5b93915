"""Models of the package transformers, which is never imported here: the plan that a model ships, and its `Conv1D`.

A model's attribute ``_tp_plan`` names a style for each layer (https://huggingface.co/docs/transformers/perf_infer_gpu_multi).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from shardscope.errors import SpecError
from shardscope.spec.tensor_plan import TensorPlan

_RULES = {
    "colwise": "columns",
    "packed_colwise": "columns:2",  # a gate and the values that it scales
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "shared",
}
"""Rules of the styles that divide layers, or layers between them."""
_WHOLE = frozenset(
    {"colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise", "replicate", "rowwise_rep",
     "rowwise_split_input"}
)  # fmt: skip
"""Styles of layers with whole inputs and outputs, which stay whole on each rank."""
_REPEATED = ".*."
"""Number of a layer among others that run one after another, in a pattern of a plan."""


def shipped_plan(model: nn.Module) -> TensorPlan | None:
    """Return the plan that a model, or the first of its parts that has one, ships; None if there is none.

    Rules for layers that this model does not have are left out, as transformers does. With sequence parallelism, the
    repeated layers process parts of sequences, and layers that give their input to several divided ones, such as
    attention, gather whole sequences.

    Raises:
        SpecError: The plan divides a layer in a way that is not available.
    """
    found = ((name, getattr(part, "_tp_plan", None)) for name, part in model.named_modules())
    prefix, styles = next(
        ((name, plan) for name, plan in found if isinstance(plan, Mapping) and plan), ("", {})
    )
    names = [name for name, _ in model.named_modules()]
    rules = {}
    for own, style in styles.items():
        pattern = f"{prefix}.{own}" if prefix else own
        if style not in _RULES and style not in _WHOLE:
            raise SpecError(
                f"the plan that the model ships divides {own!r} by the style {style!r}, which is not available; give "
                "ss.Strategy('mesh', tensor_plan=...) with the layers to divide, which may leave it whole"
            )
        if style in _RULES and any(fnmatchcase(name, pattern) for name in names):
            rules[pattern] = _RULES[style]
    if not rules:
        return None
    of_columns = Counter(pattern.rpartition(".")[0] for pattern, rule in rules.items() if rule == "columns")
    rules |= {parent: "gathered" for parent, count in of_columns.items() if count > 1}
    repeated = {pattern.partition(_REPEATED)[0]: None for pattern in rules if _REPEATED in pattern}
    return TensorPlan(rules={**rules, **{f"{name}.*": "sequence" for name in repeated}})


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is a `Conv1D`, a linear layer whose weight has the inputs in the first dimension."""
    kinds = [cls for cls in type(layer).__mro__ if cls.__module__ == "transformers.pytorch_utils"]
    return any(cls.__name__ == "Conv1D" for cls in kinds)


def resize_splits(parent: nn.Module, whole: int, part: int) -> None:
    """Follow the width of a divided layer in its parent, where GPT-2's attention splits queries, keys and values."""
    if getattr(parent, "split_size", None) == whole:
        parent.split_size = part  # type: ignore[assignment] # a number
