"""Which compression methods a strategy's tests go through: all that it carries, and error feedback where one may."""

from __future__ import annotations

from shardscope.spec.compression import Compression
from shardscope.spec.registry import names, require_known
from shardscope.spec.strategy import strategies


def carried_by(strategy: str) -> list[Compression]:
    """Every method that goes with the strategy, as it comes; and with error feedback where that is not how it comes."""
    known = [require_known(Compression, name) for name in names(Compression)]
    plain = [
        method() for method in known if method.is_on and method.carriage in strategies()[strategy].carries
    ]
    if strategy == "gossip":
        return [method for method in plain if method.diverges_because is None]
    return plain + [
        method.replace(feedback=True) for method in plain if method.settings.get("feedback") is False
    ]


def remembering(strategy: str) -> list[Compression]:
    """Those among them with error feedback."""
    return [method for method in carried_by(strategy) if method.settings.get("feedback")]
