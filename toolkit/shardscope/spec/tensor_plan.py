"""Plans of tensor parallelism: which layers of a model are divided over the ranks of a tensor group, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

from pydantic import model_validator

from shardscope._experimental import experimental
from shardscope.errors import SpecError, quoted
from shardscope.spec._base import Spec

_RULE = re.compile(r"columns(?::([1-9][0-9]*))?|rows|shared|sequence|gathered")


class Division(NamedTuple):
    """How one layer is divided: by the outputs (columns) or inputs (rows) of its matrix product, or by tokens."""

    kind: str
    """``columns``, ``rows``, ``shared``, ``sequence`` or ``gathered``."""
    groups: int = 1
    """Number of equal parts of the outputs, such as query, key and value, each of which is divided by itself."""


@experimental
class TensorPlan(Spec):
    """Which linear layers are divided over the ranks of a tensor group: a rule by name of the layer.

    A name may contain ``*`` for any characters; the first rule that matches a layer decides. ``columns`` divides a
    layer's outputs, whose input is the same on all ranks; ``rows`` divides the inputs, and sums the outputs over the
    ranks (Shoeybi et al., arXiv 1909.08053). A layer with several outputs in one, such as query, key and value, is
    ``columns:3``. All other layers are whole on each rank. A whole layer between divided ones, such as a norm of the
    queries of each head, is ``shared``: its parameters get the sum of the gradients from all ranks' heads.

    With `sequence_parallel`, layers of the rule ``sequence`` process a part of each sequence on each rank, except in
    the divided layers within them; without it, the rule has no effect. These layers run one after another, in the
    order of the model's modules, and treat each token by itself. The sequence is the second dimension of their first
    argument. A layer within them that reads the shape of its input, or gives it to several divided layers, is
    ``gathered``: its ranks gather whole sequences first.

    A job gets a plan as a setting of its strategy, which may stand beside a layout; a model may also return one from a
    method `tensor_plan` of its own. Models of transformers ship one.

    Example:
        >>> plan = TensorPlan({"*.attention.qkv": "columns:3", "*.attention.project": "rows"})
        >>> plan.division("blocks.0.attention.qkv")
        Division(kind='columns', groups=3)
        >>> import shardscope as ss
        >>> of_mesh = ss.Strategy("mesh", tensor=2, tensor_plan=plan)
        >>> job = ss.Job(model="gpt-nano", data="python-source", strategy=of_mesh, world_size=4)
        >>> layout = ss.Layout(data=2, tensor=2)
        >>> ss.Job(model="gpt-nano", data="python-source", layout=layout, strategy=of_mesh) == job
        True
    """

    _positional = "rules"

    rules: dict[str, str]
    """``columns``, ``columns:N``, ``rows``, ``shared``, ``sequence`` or ``gathered``, by the name of the layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, rule in self.rules.items():
            if not _RULE.fullmatch(rule):
                raise SpecError(
                    f"TensorPlan: {quoted(rule)} for layer {quoted(name)} is not a rule; use 'columns', 'columns:3' "
                    "for a layer with three outputs in one, 'rows', 'shared', 'sequence' or 'gathered'"
                )
        if not self.rules:
            raise SpecError(
                "TensorPlan has no rules; give a rule for each layer to divide, such as 'columns'"
            )
        return self

    def __eq__(self, other: object) -> bool:
        """Return whether two plans have the same rules in the same order, since the first that matches decides."""
        return isinstance(other, TensorPlan) and tuple(self.rules.items()) == tuple(other.rules.items())

    def __hash__(self) -> int:
        return hash(tuple(self.rules.items()))

    def pattern(self, layer: str) -> str | None:
        """Return the first pattern that a layer's name matches; None if the layer is whole on each rank."""
        return next((pattern for pattern in self.rules if fnmatchcase(layer, pattern)), None)

    def division(self, layer: str) -> Division | None:
        """Return how the layer of this name is divided; None if it is whole on each rank."""
        pattern = self.pattern(layer)
        if pattern is None:
            return None
        kind, _, groups = self.rules[pattern].partition(":")
        return Division(kind, int(groups or 1))

    @classmethod
    def resolve(cls, value: Any) -> Any:
        """Convert a mapping of rules by name of the layer, or the fields of a plan, to a plan."""
        return cls(rules=dict(value)) if isinstance(value, Mapping) and set(value) != {"rules"} else value
