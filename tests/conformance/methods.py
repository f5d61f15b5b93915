"""Which compression methods a strategy's tests go through: all that it carries, and error feedback where one may."""

from __future__ import annotations

from shardscope.spec.compression import DEFAULTS, KINDS, Compression
from shardscope.spec.strategy import STRATEGIES
from shardscope.training.compression import METHODS


def carried_by(strategy: str) -> list[Compression]:
    """Every method that goes with the strategy, as it comes; and with error feedback where that is not how it comes."""
    names = [name for name in METHODS if KINDS[name] in STRATEGIES[strategy].carries]
    plain = [Compression(name) for name in names]
    if strategy == "gossip":
        return [method for method in plain if method.name not in ("sign-vote", "terngrad")]
    return plain + [
        Compression(name, feedback=True) for name in names if DEFAULTS[name].get("feedback") is False
    ]


def remembering(strategy: str) -> list[Compression]:
    """Those among them with error feedback."""
    return [method for method in carried_by(strategy) if method.settings.get("feedback")]
