"""Optimizers in layouts: those that jobs can train with, and published optimizers that can only be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, SerializeAsAny

from shardscope.errors import unknown_name
from shardscope.spec import registry
from shardscope.spec._base import Spec
from shardscope.spec.optimizer import Optimizer, OptimizerStates


class _Published(NamedTuple):
    states: OptimizerStates
    source: str


PUBLISHED: Mapping[str, _Published] = MappingProxyType(
    {
        "adafactor": _Published(
            OptimizerStates(tensors=0, per_factor=1),
            "Shazeer and Stern 2018 (arXiv 1804.04235), section 4, without momentum: sums of rows and columns only",
        ),
        "adam8bit": _Published(
            OptimizerStates(tensors=2, element_bytes=1 + 4 / 256),
            "bitsandbytes: moments of 1 byte, a float32 scale for 256 elements (2,048 in Dettmers et al. 2022, arXiv "
            "2110.02861); its 4-byte moments for tensors of fewer than 4,096 elements are ignored here",
        ),
        "muon": _Published(
            OptimizerStates(tensors=1, outside_hidden=1, orthogonalizes=True),
            "Jordan et al. 2024: one momentum for hidden matrices; AdamW, with two moments, updates the rest",
        ),
    }
)
"""Optimizers that Shardscope can predict but not train with: the size of their state, and its source."""


def _published(name: str) -> str:
    if name not in PUBLISHED:
        raise unknown_name("optimizer", name, PUBLISHED)
    return name


class PublishedOptimizer(Spec):
    """An optimizer in `PUBLISHED`, which predictions support but jobs cannot train with."""

    _positional = "name"

    name: Annotated[str, AfterValidator(_published)]

    @property
    def label(self) -> str:
        """The optimizer's name."""
        return self.name

    @property
    def states(self) -> OptimizerStates:
        """Size of the optimizer state."""
        return PUBLISHED[self.name].states


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimizers that a layout accepts."""
    return tuple(dict.fromkeys([*registry.names(Optimizer), *PUBLISHED]))


LayoutOptimizer = Optimizer | PublishedOptimizer


def layout_optimizer(value: Any) -> LayoutOptimizer:
    """Convert a layout's `optimizer` field (an object, class, name or JSON) to an optimizer.

    Raises:
        SpecError: There is no optimizer with this name, or it does not accept these settings.
    """
    if isinstance(value, PublishedOptimizer):
        return value
    name = value["name"] if isinstance(value, dict) and value.keys() == {"name"} else value
    if isinstance(name, str) and registry.find(Optimizer, name) is None:
        if name in PUBLISHED:
            return PublishedOptimizer(name=name)
        if isinstance(value, str):
            raise unknown_name("optimizer", value, optimizer_names())
    found: Optimizer = Optimizer.resolve(value)
    return found


AnyStates = LayoutOptimizer | OptimizerStates | str
"""Ways to pass an optimizer to memory formulas: the optimizer, its states or its name."""


def states_of(optimizer: AnyStates) -> OptimizerStates:
    """Return the size of the state of an optimizer, given by name, as an object, or already as an `OptimizerStates`.

    Raises:
        SpecError: There is no optimizer of this name.

    Example:
        >>> states_of("adafactor").per_factor, states_of("lamb").tensors
        (1, 2)
    """
    return optimizer if isinstance(optimizer, OptimizerStates) else layout_optimizer(optimizer).states


AnyLayoutOptimizer = Annotated[
    SerializeAsAny[Optimizer] | PublishedOptimizer, BeforeValidator(layout_optimizer)
]
"""A field that accepts an optimizer, its name, its class, its JSON, or a name in `PUBLISHED`."""
