"""The part of a traced step that a rank of a pipeline runs: the parameters, buffers and collectives of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from shardscope.analytic.schedules.stage_passes import PHASES, StagePass
from shardscope.spec.model.step import AxisMessage, Moment, ParameterRow, PipelinePiece, StepTrace

PLACEHOLDER = ParameterRow(unit=0, shape=(1,))
"""The parameter of a rank without trained parameters, because every rank needs an optimizer."""


def stage_trace(
    trace: StepTrace,
    stages: Sequence[Sequence[PipelinePiece]],
    *,
    has_loss: bool,
    passes: Sequence[Sequence[StagePass]] = (),
) -> StepTrace:
    """Return the trace of the layers of a rank's stages.

    Each stage has a root unit of its own around its units, as with FSDP2. Bytes of activations are those of the whole
    model, because layers are traced together; `StepTrace.pieces` tells those of each layer.

    Args:
        trace: Trace of the whole model.
        stages: The layers of each of the rank's stages, from `trace.pieces`.
        has_loss: Whether the last stage is the model's last.
        passes: The passes of each of these stages in a step; empty if no backward pass is split.
    """
    own = _parameters(stages)
    places = sorted({*chain(*own)})
    numbers = _units(trace, own)
    rows = [
        trace.parameters[place].replace(
            unit=numbers[next(k for k, held in enumerate(own) if place in held), unit]
        )
        for place in places
        for unit in [trace.parameters[place].unit]
    ]
    buffers = sorted({place for pieces in stages for piece in pieces for place in piece.buffers})
    sizes = tuple(trace.buffer_sizes[place] for place in buffers)
    return trace.replace(
        units=tuple(trace.units[unit] for _, unit in numbers),
        parameters=tuple(rows if any(row.is_trained for row in rows) else [*rows, PLACEHOLDER]),
        gradient_order=tuple(places.index(place) for place in trace.gradient_order if place in places),
        buffer_sizes=sizes,
        buffer_bytes=sum(sizes),
        pieces=(),
        moments={mode: tuple(_moments(rows, numbers)) for mode, rows in trace.moments.items()},
        layer_moments={},
        flowing_moments={},
        messages=stage_messages(trace, stages, passes or [()] * len(stages), has_loss=has_loss),
    )


def rank_traces(
    trace: StepTrace,
    stages: Sequence[tuple[int, Sequence[PipelinePiece]]],
    passes: Sequence[Sequence[StagePass]] = (),
) -> list[StepTrace]:
    """Return the trace of each rank's layers.

    Args:
        trace: Trace of the whole model.
        stages: The rank and the layers of each stage, in order.
        passes: The passes of each stage in a step; empty if no backward pass is split.
    """
    held = _held(stages)
    return [
        stage_trace(
            trace, [stages[stage][1] for stage in held[rank]], has_loss=rank == stages[-1][0],
            passes=[passes[stage] for stage in held[rank]] if passes else (),
        )
        for rank in sorted(held)
    ]  # fmt: skip


def with_repeated(trace: StepTrace, stages: Sequence[tuple[int, Sequence[PipelinePiece]]]) -> StepTrace:
    """Return the trace with the parameters marked that several stages of a rank use; see `rank_traces`."""
    own = _parameters(pieces for _, pieces in stages)
    uses = Counter((stages[stage][0], place) for stage, places in enumerate(own) for place in places)
    repeated = {place for (_, place), count in uses.items() if count > 1}
    rows = (row.replace(is_repeated=place in repeated) for place, row in enumerate(trace.parameters))
    return trace.replace(parameters=tuple(rows)) if repeated else trace


def stages_of_units(
    trace: StepTrace, stages: Sequence[tuple[int, Sequence[PipelinePiece]]]
) -> list[list[int]]:
    """Return the stage of each unit of `rank_traces`, by rank; the arguments are the same."""
    held = _held(stages)
    return [
        [
            held[rank][stage]
            for stage, _ in _units(trace, _parameters(stages[stage][1] for stage in held[rank]))
        ]
        for rank in sorted(held)
    ]


def _held(stages: Sequence[tuple[int, Sequence[PipelinePiece]]]) -> dict[int, list[int]]:
    """Return the stages of each rank."""
    held: dict[int, list[int]] = {}
    for stage, (rank, _) in enumerate(stages):
        held.setdefault(rank, []).append(stage)
    return held


def _parameters(stages: Iterable[Sequence[PipelinePiece]]) -> list[list[int]]:
    """Return the indices of the parameters that each stage uses."""
    return [sorted({place for piece in pieces for place in piece.parameters}) for pieces in stages]


def _units(trace: StepTrace, own: Sequence[Sequence[int]]) -> Mapping[tuple[int, int], int]:
    """Return the new number of each unit, by its stage and its number in the whole model."""
    units = [
        (stage, unit)
        for stage, places in enumerate(own)
        for unit in sorted({0, *(trace.parameters[place].unit for place in places)})
    ]
    return {each: number for number, each in enumerate(units)}


def _moments(rows: Sequence[Moment], numbers: Mapping[tuple[int, int], int]) -> list[Moment]:
    return [
        row.replace(unit=number) for row in rows for (_, unit), number in numbers.items() if unit == row.unit
    ]


def stage_messages(
    trace: StepTrace,
    stages: Sequence[Sequence[PipelinePiece]],
    passes: Sequence[Sequence[StagePass]],
    *,
    has_loss: bool,
) -> dict[str, tuple[AxisMessage, ...]]:
    """Return the collectives of the layers' passes, and those of the loss, which no layer calls, on the last stage.

    The arguments are those of `stage_trace`, with empty passes of a stage whose backward passes are not split.
    """
    found = {}
    for mode, every in trace.messages.items():
        mine = chain(*(_called(pieces, mode, own) for pieces, own in zip(stages, passes, strict=True)))
        left = [*every]
        for message in chain(*(piece.messages.get(mode, ()) for piece in trace.pieces)):
            left.remove(message)
        found[mode] = (*mine, *(left if has_loss else ()))
    return found


def _called(pieces: Sequence[PipelinePiece], mode: str, passes: Sequence[StagePass]) -> Iterator[AxisMessage]:
    """Yield the collectives that the layers of a stage call in its passes."""
    whole = [message for piece in pieces for message in piece.messages.get(mode, ())]
    if not passes:
        yield from whole
        return
    split = [message for piece in pieces for message in piece.split_messages.get(mode, ())]
    all_of_them = {each.micro_batch for each in passes}
    in_two = {each.micro_batch for each in passes if each.is_split}
    found: list[tuple[list[AxisMessage], set[int]]] = [(split, in_two)]
    for phase in PHASES[1:]:  # the first stage's whole backward pass is a pass for weights
        own = {each.micro_batch for each in passes if each.phase == phase} - in_two
        found.append(
            ([each if each.phase == "forward" else each.replace(phase=phase) for each in whole], own)
        )
    for messages, own in found:
        if own:
            among = None if own == all_of_them else frozenset(own)
            yield from (each.replace(micro_batches=among) for each in messages)
