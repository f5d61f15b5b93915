"""`check_method` passes a user's optimizer whose state comes back equal, whatever its form, and names what does not."""

from __future__ import annotations

import re

import pytest

import shardscope as ss
from shardscope.spec.optimizer import OptimizerStates
from training.optim.user_optimizers import UserOptimizer


class EveryForm(UserOptimizer):
    """Counters of a group, numbers, texts and lists of a parameter, and moments in bf16 and 8 bits."""

    name = "every-form"
    type_name: str = "EveryForm"

    @property
    def states(self) -> OptimizerStates:
        """A moment of 2 bytes and one of 1 byte per element, and a number per tensor."""
        return OptimizerStates(tensors=1, element_bytes=3, counter_bytes=4)


class Hidden(UserOptimizer):
    """An object that no state_dict has."""

    name = "hidden"
    type_name: str = "HiddenObject"

    @property
    def states(self) -> OptimizerStates:
        """No tensors."""
        return OptimizerStates(tensors=0)


class Object(UserOptimizer):
    """An object as an entry of a parameter."""

    name = "object-entry"
    type_name: str = "ObjectEntry"

    @property
    def states(self) -> OptimizerStates:
        """No tensors."""
        return OptimizerStates(tensors=0)


@pytest.mark.weekly
def test_state_of_every_form_that_comes_back_equal_passes() -> None:
    ss.check_method(EveryForm)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "what"), [(Hidden, "its attribute 'clock'"), (Object, "entry 'clock' of parameter")]
)
def test_state_that_is_lost_fails_by_name(method: type[UserOptimizer], what: str) -> None:
    with pytest.raises(
        AssertionError, match=f"{method.__name__} fails test_a_resumed_run_ends.*{re.escape(what)}"
    ):
        ss.check_method(method)
