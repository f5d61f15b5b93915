"""Buttons that inject real faults into a running run, resize it, or continue an ended run, each with a description."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ipywidgets as widgets
import traitlets as t

from shardscope.spec.observed import ObservedJob
from shardscope_widgets.fault_lab import _words
from shardscope_widgets.fault_lab._resizer import Resizer
from shardscope_widgets.fault_lab._resumer import Resumer
from shardscope_widgets.fault_lab._words import Standing
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.form import named, own_trait
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed, heading, note_html, words_html

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.spec import Faults
    from shardscope_widgets.trace import Trace

DROP_S = 3.0
"""Duration of a dropped link, in seconds."""


class Breakage(t.HasTraits):
    """Settings of a fault to inject: which rank, when, and for how long."""

    rank = own_trait(0, "Rank", "The rank that is killed or slowed down.", values=named([0]), least=0)
    step = own_trait(0, "Before step", "The step before which the fault occurs.", blank="the next", least=0)
    factor = own_trait(
        3.0, "Slowdown", "Factor by which a slowed rank's compute time grows.", least=1.1, most=100.0
    )
    num_steps = own_trait(20, "Steps slowed", "Number of steps for which a rank is slowed down.", least=1)


class Breaker:
    """Controls and buttons for one run at a time, which is set by `show`.

    Args:
        guard: Shows the errors of the buttons.
        on_resume: Called with a run that has ended, to continue it from its newest checkpoint.
    """

    def __init__(self, guard: Guard, on_resume: Callable[[Run], object]) -> None:
        self.resumer = Resumer(on_resume)
        self.resumer.button.on_click(guard.callback(self.resumer.press))
        self.resizer = Resizer()
        self.resizer.button.on_click(guard.callback(self.resizer.press))
        self.choices = Breakage()
        self.controls = controls_for(self.choices)
        self.buttons = {
            "kill": widgets.Button(description="Kill a rank", icon="bolt"),
            "slow": widgets.Button(icon="hourglass-half"), "drop": widgets.Button(icon="chain-broken"),
        }  # fmt: skip
        self.sentences = {name: widgets.HTML() for name in self.buttons}
        self.said = widgets.HTML()
        self._run: Run | None = None
        self._standing: Standing | None = None
        self._per_node: int | None = None
        for name, act in (("kill", self.kill), ("slow", self.slow), ("drop", self.drop)):
            self.buttons[name].on_click(guard.callback(act))
        self.choices.observe(lambda _change: self._say())
        self._rows = {
            name: classed(widgets.HBox([button, self.sentences[name]]), "ss-break-row")
            for name, button in self.buttons.items()
        }
        bar = classed(widgets.HBox(list(self.controls.values())), "ss-controls", "ss-break-bar")
        self.body = widgets.VBox([bar, *self._rows.values()])
        title = heading("Inject faults", "into the run in progress")
        self.box = classed(widgets.VBox([title, self.body, self.said, self.resumer.box]), "ss-break")
        self.resize_box = classed(widgets.VBox([self.resizer.box]), "ss-break")
        self.show(None, None)

    def show(self, run: Run | None, trace: Trace | None) -> None:
        """Show the buttons for this run, if it is running; None hides them."""
        if (run and run.id) != (self._run and self._run.id):
            self.choices.rank = self.choices.step = 0
            self.said.value, self._standing = "", None
            self._per_node = None if run is None or run.cluster is None else run.cluster.per_node
        self._run = run
        self.resumer.show(run)
        self.resizer.show(run, 0 if trace is None else trace.world_size)
        is_observed = run is not None and isinstance(run.job, ObservedJob)
        if run is None or trace is None or is_observed or not run.is_alive:
            self._standing = None
            self.body.layout.display = "none"
            self.buttons["kill"].disabled = True  # a lab shows it elsewhere, too
            self.said.value = words_html(
                _words.NO_RUN if run is None else _words.OBSERVED if is_observed else _words.NOT_RUNNING
            )
            return
        if self._standing is None:
            self.said.value = ""
        standing = Standing(run.job, trace.last_step, run.newest_checkpoint or 0)
        if standing != self._standing:
            self._standing = standing
            self.body.layout.display = None
            self.buttons["kill"].disabled = False
            self._offer_ranks(run.job.world_size)
            self._say()

    def _offer_ranks(self, world_size: int) -> None:
        control = self.controls["rank"]
        if len(control.options) != world_size:
            control.options = [(str(rank), rank) for rank in range(world_size)]
            self.choices.rank = min(self.choices.rank, world_size - 1)

    @property
    def _node(self) -> int | None:
        """Node of the chosen rank on an emulated cluster; None elsewhere."""
        return None if self._per_node is None else self.choices.rank // self._per_node

    def _say(self) -> None:
        """Label each button with what it breaks, and describe its effect next to it."""
        if self._standing is None:
            return
        chosen, standing, node = self.choices, self._standing, self._node
        self.buttons["kill"].description = f"Kill rank {chosen.rank}"
        self.buttons["slow"].description = f"Slow rank {chosen.rank}"
        told = {
            "kill": _words.kill_text(standing, chosen.rank, chosen.step),
            "slow": _words.slow_text(standing, chosen.rank, chosen.step, chosen.factor, chosen.num_steps),
        }
        self._rows["drop"].layout.display = "none" if node is None else None
        if node is not None:
            self.buttons["drop"].description = f"Drop link of node {node}"
            told["drop"] = _words.drop_text(node, chosen.step, DROP_S, standing.job.timeout_s)
        for name, text in told.items():
            self.buttons[name].tooltip = text
            self.sentences[name].value = note_html(text)

    def kill(self) -> None:
        """Kill the chosen rank, as its button does."""
        self._inject(lambda faults, step: faults.kill(self.choices.rank, step=step))

    def slow(self) -> None:
        """Slow the chosen rank down, as its button does."""
        chosen = self.choices
        self._inject(
            lambda faults, step: faults.slow(
                chosen.rank, factor=chosen.factor, steps=(step, step + chosen.num_steps - 1)
            )
        )

    def drop(self) -> None:
        """Drop the link of the chosen rank's node, as its button does."""
        self._inject(lambda faults, step: faults.drop_link(f"n{self._node}", step=step, lasts=DROP_S))

    def _inject(self, add: Callable[[Faults, int], Faults]) -> None:
        from shardscope.spec import Faults

        run = self._run
        if run is None:
            return
        step = self.choices.step or run.reduced().last_step + 1
        (fault,) = faults = add(Faults(), step)
        run.inject(faults)
        self.said.value = words_html(_words.asked_text(fault, self.choices.step), is_live=True)
