"""Parts of a traced model whose experts are distributed over ranks: the parameters of experts, and all others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardscope.spec.model.step import ParameterRow, StepTrace

_WEIGHT_DIMS = 3
"""Dimensions of the weights of a linear layer of all experts; its biases have two."""


def part_of(trace: StepTrace, *, of_experts: bool) -> StepTrace:
    """Return a trace with the parameters of experts only, or with the other parameters."""
    places = [place for place, row in enumerate(trace.parameters) if row.is_expert == of_experts]
    return trace.replace(
        parameters=tuple(trace.parameters[place] for place in places),
        gradient_order=tuple(places.index(place) for place in trace.gradient_order if place in places),
    )


def layer_numbers(rows: Sequence[ParameterRow]) -> list[int]:
    """Return the number, from 0, of the linear layer to which each parameter of experts belongs."""
    return [number - 1 for number in accumulate(int(len(row.shape) == _WEIGHT_DIMS) for row in rows)]
