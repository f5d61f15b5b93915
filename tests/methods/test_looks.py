"""Figures tell methods apart by their looks."""

from __future__ import annotations

import pytest

from shardscope import Compression, Optimizer, Strategy
from shardscope.spec.look import YOUR_OWN, MethodStyle
from shardscope.spec.registry import names, origin, require_known


@pytest.mark.parametrize("kind", [Compression, Optimizer, Strategy])
def test_no_two_methods_of_a_kind_look_alike(kind: type[Compression | Optimizer | Strategy]) -> None:
    takers: dict[MethodStyle, str] = {YOUR_OWN: "methods that do not say"}
    for method in (require_known(kind, name) for name in names(kind)):
        if origin(method) == "built-in":
            taker = takers.setdefault(method.look, method.name)
            assert taker == method.name, f"{method.name} looks as {taker}; give it another dash or symbol"
