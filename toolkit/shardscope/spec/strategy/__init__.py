"""Strategies: how the ranks share the work. One class each, in a file of its own, told apart by `kind`.

Wherever a strategy is asked for, its short string does as well: ``"ring"`` is ``Ring()``, and what follows a colon
sets the field that the class names in `_variant`: ``"ring:2"`` is ``Ring(directions=2)``. To add a strategy, write its
class in a file here, add it to `AnyStrategy`, and implement it in one file of `shardscope.training.strategies`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec.strategy.all_reduce import AllReduce, Bucketed
from shardscope.spec.strategy.base import StrategySpec
from shardscope.spec.strategy.gossip import Gossip
from shardscope.spec.strategy.hierarchical import Hierarchical
from shardscope.spec.strategy.parameter_server import ParameterServer
from shardscope.spec.strategy.pipeline import Pipeline
from shardscope.spec.strategy.ring import Ring
from shardscope.spec.strategy.single import Single
from shardscope.spec.strategy.tree import Tree
from shardscope.spec.strategy.zero import FullySharded, Zero1, Zero2, Zero3

AnyStrategy = (
    Single
    | ParameterServer
    | AllReduce
    | Tree
    | Ring
    | Hierarchical
    | Gossip
    | Pipeline
    | Zero1
    | Zero2
    | Zero3
)  # fmt: skip
STRATEGIES: dict[str, type[StrategySpec]] = {
    cls.model_fields["kind"].default: cls for cls in get_args(AnyStrategy)
}
"""Every strategy there is, by its short name, in the order in which training systems evolved."""


def parse_strategy(value: Any) -> Any:
    """``"ring:2"`` as ``Ring(directions=2)``; a strategy or a mapping with `kind` is passed through, checked.

    Raises:
        SpecError: Unknown name, or a variant where there is none.
    """
    if isinstance(value, dict):
        kind = value.get("kind")
        if not isinstance(kind, str) or kind not in STRATEGIES:
            raise unknown_name("strategy", kind, STRATEGIES)
        return STRATEGIES[kind].from_fields(value)
    if isinstance(value, StrategySpec):
        return value
    if not isinstance(value, str):
        raise SpecError(
            f"strategy={quoted(value)} is not a strategy; give a name such as 'ring', "
            "or one with settings such as Ring()"
        )
    kind, _, variant = value.partition(":")
    if kind not in STRATEGIES:
        raise unknown_name("strategy", value, STRATEGIES)
    cls = STRATEGIES[kind]
    if not variant:
        return cls()  # type: ignore[call-arg]  # each has a default kind
    if cls._variant is None:
        raise SpecError(f"strategy={quoted(value)}: {kind!r} has no variants; use {kind!r}")
    return cls(**{cls._variant: int(variant) if re.fullmatch("[0-9]{1,18}", variant) else variant})


Strategy = Annotated[AnyStrategy, BeforeValidator(parse_strategy)]

__all__ = [
    "STRATEGIES",
    "AllReduce",
    "AnyStrategy",
    "Bucketed",
    "FullySharded",
    "Gossip",
    "Hierarchical",
    "ParameterServer",
    "Pipeline",
    "Ring",
    "Single",
    "Strategy",
    "StrategySpec",
    "Tree",
    "Zero1",
    "Zero2",
    "Zero3",
    "parse_strategy",
]
