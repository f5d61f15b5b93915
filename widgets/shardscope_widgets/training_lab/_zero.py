"""ZeRO at a glance: the memory of the form's job under ZeRO's stages 0 to 3, predicted before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.errors import ShardscopeError
from shardscope.spec.strategy import strategies
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._memory_kinds import (
    LAYERS,
    draw_memory_kinds,
    memory_kinds_info,
    states_text,
)
from shardscope_widgets.figures._stacks import STATES
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, heading, words_html
from shardscope_widgets.kit.swatch import chip
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope.spec import Job

STAGES = (0, 1, 2, 3)
_TICKS_PX, _HEAD_PX = 4, 4
_KEYS = "".join(
    f"<span>{chip(layer.look)}{safe(layer.name)}</span>" for layer in LAYERS if not layer.is_faint
)
_FAINT = f"faint: {', '.join(layer.name for layer in LAYERS if layer.is_faint)}"


class ZeroStages:
    """A bar of peak memory per rank for each stage, with the bar of the form's strategy highlighted, and a sentence."""

    def __init__(self) -> None:
        self.figure = LiveFigure(theme.blank(), label="Predicted memory of a rank under ZeRO's stages")
        self.words = widgets.HTML()
        keys = widgets.HTML(f'<div class="ss-legend">{_KEYS}<span class="ss-faint">{_FAINT}</span></div>')
        title = heading("What ZeRO would save", "memory of a rank")
        self.box = classed(widgets.VBox([title, self.figure, keys, self.words]), "ss-zero")
        self.draw("", [])

    def draw(self, chosen: str, predictions: list[JobPrediction]) -> None:
        """Draw the predictions of the stages; hide the panel if there are fewer than two.

        Args:
            chosen: Label of the form's strategy.
            predictions: One prediction for each stage.
        """
        info = memory_kinds_info(predictions)
        self.box.remove_class("ss-outdated")
        self.box.layout.display = None if len(info.runs) > 1 else "none"
        if len(info.runs) > 1:
            figure = draw_memory_kinds(info, chosen=chosen)
            figure.update_layout(
                showlegend=False, margin={"t": _HEAD_PX, "b": _TICKS_PX, "l": 4}, xaxis_showticklabels=False,
                height=figure.layout.height - figure.layout.margin.t - _HEAD_PX,
            )  # fmt: skip
            self.figure.show(figure)
            self.words.value = words_html(f"{states_text(info)} {alike_text(predictions)}".strip())


def alike_text(predictions: Sequence[JobPrediction]) -> str:
    """Return why stages 2 and 3 hold equal states; empty if they do not, or if one of them is not predicted."""
    states = {each.job.strategy.zero_stage: _states_bytes(each) for each in predictions}
    if not states.get(2) or states.get(2) != states.get(3):
        return ""
    return (
        "ZeRO 2 and 3 hold equal model states, because here both shard the parameters between steps. ZeRO 2 gathers "
        "them once per step and keeps them whole until the backward pass ends; ZeRO 3 keeps those of a layer whole "
        "only while the layer runs, which lowers the peak."
    )


def _states_bytes(prediction: JobPrediction) -> int:
    """Return the bytes of states on the rank that holds most of them; 0 if unknown."""
    rows = [prediction.kinds[kind] for kind in STATES if kind in prediction.kinds]
    return int(max(map(sum, zip(*rows, strict=True)), default=0))


def predicted_stages(
    found: JobPrediction, predict: Callable[[Job], JobPrediction | None]
) -> list[JobPrediction]:
    """Return predictions of a job under each stage of ZeRO; empty if its strategy does not correspond to a ZeRO stage.

    Args:
        found: Prediction of the job; it is used for the stage of its own strategy.
        predict: Function that predicts another job.
    """
    own = found.job.strategy.zero_stage
    if own is None or found.job.num_data_ranks == 1:
        return []
    stages = (found if stage == own else _predicted(found.job, stage, predict) for stage in STAGES)
    return [each for each in stages if each is not None]


def _predicted(job: Job, stage: int, predict: Callable[[Job], JobPrediction | None]) -> JobPrediction | None:
    """Return the prediction of the first job of a stage that can be predicted; None if there is none."""
    for changed in _jobs(job, stage):
        if (found := predict(changed)) is not None:
            return found
    return None


def _jobs(job: Job, stage: int) -> Iterator[Job]:
    for strategy in strategies().values():
        made = strategy()
        if made.zero_stage == stage and made.differs_because is None and made.min_ranks <= job.num_data_ranks:
            mesh = job.strategy.replace(data=made) if job.strategy.is_composite else made
            try:
                yield job.replace(strategy=mesh, name=None)
            except ShardscopeError:  # the job has a setting that this strategy cannot have
                continue
