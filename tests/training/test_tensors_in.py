"""What is found, in which order, and what is passed by."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardscope.errors import SpecError
from shardscope.training import tensors_in as home
from shardscope.training.tensors_in import tensors_in


def test_tensors_are_found_once_and_in_their_order() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    value = [a, {"x": (b, a), "y": SimpleNamespace(z=deque([c]), n=3)}, d]
    value.append(value)
    assert [id(t) for t in tensors_in(value)] == [id(t) for t in (a, b, c, d)]


def test_a_deep_list_is_walked_to_its_end() -> None:
    end = torch.zeros(1)
    value: Any = end
    for _ in range(20_000):
        value = [value]
    assert tensors_in(value) == [end]


def test_what_holds_no_tensors_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "MAX_OBJECTS", 20)
    state = SimpleNamespace(
        log=logging.getLogger("some.user"), numbers=list(range(20_000)), table={str(i): i for i in range(20_000)},
        lock=threading.Lock(), torch=torch, net=nn.Linear(2, 2), hidden=torch.ones(1),
    )  # fmt: skip
    assert tensors_in(state) == [state.hidden]


def test_a_mapping_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return Endless()

        def __iter__(self) -> Iterator[str]:
            return iter(["next"])

        def __len__(self) -> int:
            return 1

    monkeypatch.setattr(home, "MAX_OBJECTS", 1000)
    with pytest.raises(
        SpecError, match="an? Endless that a layer takes or returns contains more than 1,000 objects"
    ):
        tensors_in(Endless())
