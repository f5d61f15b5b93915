"""The controls for where a job runs: this machine, or a cluster emulated on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import traitlets as t

from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.place import EMULATED, HERE, OWN_SPEED, PlaceChoices, check_on
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.controls import controls_for, field
from shardscope_widgets.kit.form import setting_in
from shardscope_widgets.kit.markup import classed, note_html

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.spec.cluster import EmulatedCluster

TITLE = "Where it runs"
_DEFAULTS = {"per_node": 1, "racks": 1, "node_latency": "0 s", "processor": OWN_SPEED}


class Place(Background):
    """Controls for `choices`, in a box whose title names the cluster.

    The job's number of ranks and the number of nodes are kept in sync. Whether this machine can emulate clusters is
    checked when the lab is displayed; if it cannot, the control says why.

    Args:
        job_choices: The form of the job.
        on_change: Called when the place has changed.
    """

    def __init__(self, job_choices: JobChoices, on_change: Callable[[], None]) -> None:
        self.choices = PlaceChoices()
        self.why_not = ""
        self._can: bool | None = None
        self.controls = controls_for(self.choices)
        self._fields = {name: field(control) for name, control in self.controls.items()}
        self.box = classed(widgets.VBox(list(self._fields.values())), "ss-controls")
        self._job_choices, self._on_change = job_choices, on_change
        self.choices.observe(self._changed)
        job_choices.observe(lambda change: self.choices.fit(change["new"]), "world_size")
        self._show()

    @property
    def title(self) -> str:
        """Title of the box, with the cluster's name unless the choices contradict each other."""
        try:
            cluster = self.choices.cluster()
        except ValueError:
            return TITLE
        return TITLE if cluster is None else f"{TITLE}: {cluster.name}"

    def cluster_for(self, job: Job) -> EmulatedCluster | None:
        """Return the emulated cluster for a job; None if it runs on this machine.

        Raises:
            SpecError: The choices contradict each other, or the job cannot run on the cluster.
        """
        cluster = self.choices.cluster()
        check_on(job, cluster)
        return cluster

    def can_emulate(self) -> bool:
        """Return whether this machine can emulate clusters."""
        if self._can is None:
            from shardscope.runtime.emulated import why_not_emulated

            self.why_not = why_not_emulated()
            self._can = not self.why_not
        return self._can

    def choose(self, place: Mapping[str, Any] | None) -> None:
        """Choose a cluster of one node per rank with these `PlaceChoices` traits; None chooses this machine."""
        self.choices.place = HERE
        if place is not None:
            for name, value in {**_DEFAULTS, **place}.items():
                setattr(self.choices, name, value)
            self.choices.nodes = self._job_choices.num_ranks
            self.choices.place = EMULATED

    def begin(self) -> None:
        """Check in a thread whether this machine can emulate clusters; call this when the lab is displayed."""
        if self._thread is None:
            self._start(self._find_out, name="place")

    def _find_out(self) -> None:
        if not self.can_emulate():
            self.choices.place = HERE
            self._show()

    def _changed(self, change: t.Bunch) -> None:
        choices = self.choices
        if change["name"] == "place":
            choices.fit(self._job_choices.num_ranks)
        ranks = choices.nodes * choices.per_node
        if choices.is_emulated and ranks <= (setting_in(JobChoices, "world_size").most or ranks):
            self._job_choices.world_size = ranks
        self._show()
        self._on_change()

    def _show(self) -> None:
        choices = self.choices
        for name, box in self._fields.items():
            is_needed = name == "place" or (choices.is_emulated and (name != "uplink" or choices.racks > 1))
            box.layout.display = None if is_needed else "none"
        self.controls["place"].disabled = bool(self.why_not)
        about = self._fields["place"].children[1]
        reason = f"{self.why_not[:1].upper()}{self.why_not[1:]}." if self.why_not else ""
        about.value = note_html(self.controls["place"].tooltip) + note_html(reason) * bool(reason)
