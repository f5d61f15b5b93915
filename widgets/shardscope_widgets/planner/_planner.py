"""The Planner widget: inputs on the left, ranked plans on the right, and the callbacks between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import traitlets as t

from shardscope.calibration.software import SOFTWARE, software_of
from shardscope.errors import ShardscopeError, SpecError
from shardscope.planner import Plans, SearchAxes, default_batch, known_model, plan
from shardscope.planner.shipped import LEAST_SAVED
from shardscope.planner.table import recommended
from shardscope.spec.cluster import Cluster, Device, EmulatedCluster
from shardscope.spec.job_parts import Record
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model, Transformer
from shardscope.spec.numbers import LARGEST_COUNT
from shardscope_widgets.figures import _plan_answer, _plan_mesh
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.form import check_options, named, own_trait, trait_of
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.kit.still import Still
from shardscope_widgets.planner._hold_fixed import HoldFixed
from shardscope_widgets.planner._measured import MeasuredPlan, calibration_of_steps, measured_step
from shardscope_widgets.planner._screen import PlannerScreen, as_in_form
from shardscope_widgets.planner._trained import ENOUGH, Trained, TrainedPlan

if TYPE_CHECKING:
    from shardscope.planner.rehearsal import Rehearsal
    from shardscope.runtime import Run

WEIGHTS = {"time": "Time", "headroom": "Memory left", "dollars": "Dollars"}
ASKED = ("model", "device", "nodes", "software", "seq", "global_batch", "precision")
BUDGET = "tokens_billions"
STEPS_S = (8.0, 16.0)
"""Step times in seconds that a plan may take when it is trained small: the shortest possible one is taken."""
NUM_STEPS = 3
"""Number of steps of a plan that is trained small."""
START_S = 20.0
"""Time in which a machine with two cores predicts the small job and starts its ranks, in seconds."""
MOST_TRAINED = 8
"""Maximum number of ranks on which a plan is trained small."""
OPTIONS = (*ASKED, BUDGET, "unshipped", "fix", "weights", "chosen")


def _transformers() -> tuple[tuple[str, str], ...]:
    """Return the names of the presets that the planner accepts: transformers, because all their layers are equal."""
    return named(name for name in Model.names() if isinstance(Model.of(name), Transformer))


class Planner(Still, widgets.VBox):  # type: ignore[misc]
    """Choose a model and a cluster; see all layouts ranked, the Pareto front, and why a layout is slower than the best.

    Changing the weights re-ranks the plans of the last search within milliseconds. Any other change starts a new
    search. Choosing another model sets sequence length and global batch to the defaults of that model. A measured step
    of the chosen plan calibrates the cluster, and all plans are predicted and ranked again; see `measure`.

    Args:
        model: Name of a preset, or a `Transformer`.
        cluster: A `Cluster`, or an emulated one, to use instead of `device` and `nodes`.
        choices: Initial values of any traits.

    Example:
        >>> planner = Planner(model="gpt3-175b", nodes=128)  # doctest: +SKIP
        >>> planner.plans.best.layout  # doctest: +SKIP
    """

    model = own_trait("gpt3-175b", "Model", "Model to plan for.", values=_transformers)
    device = own_trait("a100-80gb", "Device", "Accelerator of the cluster.", values=named(Device.names()))
    nodes = own_trait(
        128, "Nodes", "Number of nodes; the device determines their size and links.", least=1, reach=1 << 14
    )
    software = own_trait(
        "",
        "Framework",
        "Framework that trains the model: only layouts that it supports are searched, except on axes held fixed.",
        values=(("set by the layout", ""), *named(SOFTWARE)),
    )
    unshipped = t.Bool(False, help="Also search settings that the framework does not support.")
    seq = own_trait(2048, "Sequence, tokens", "Tokens per sequence.", least=1, most=LARGEST_COUNT)
    global_batch = trait_of(Layout, "global_batch", "Batch, sequences", default=2048)
    tokens_billions = own_trait(
        300.0,
        "Tokens, billions",
        "Number of tokens to train on, in billions; it sets the time to train and the cost.",
        least=0.001,
        step=10,
    )
    precision = trait_of(Layout, "precision")
    fix = t.Dict(help="Layout axes fixed to one value or several, by name.")
    weights = t.Dict(default_value={"time": 1.0}, help="Weight of each objective in the ranking, by name.")
    chosen = t.Int(
        1, min=1, help="Position in the ranking, from 1, of the plan shown; initially the recommended one."
    )
    problem = t.Unicode("", help="The last error, as HTML; empty if there is none.")
    plans = t.Instance(Plans, allow_none=True, help="Result of the last search, ranked by `weights`.")

    @t.validate("software")
    def _known_software(self, proposal: Mapping[str, Any]) -> str:
        return software_of(proposal["value"]).name if proposal["value"] else ""

    def __init__(
        self,
        model: str | Transformer | None = None,
        *,
        cluster: Cluster | EmulatedCluster | None = None,
        **choices: Any,
    ) -> None:
        super().__init__()
        self._own_model = model if isinstance(model, Transformer) else None
        self._own_cluster, self._is_filling = cluster, False
        self.on_train: Callable[[Rehearsal, Run], None] | None = None
        self.measured: list[MeasuredPlan] = []
        name = model.name if isinstance(model, Transformer) else model
        check_options("Planner", (field for field in choices if not self.has_trait(field)), OPTIONS)
        self.model = name or self.model
        self._take_model()
        if isinstance(cluster, EmulatedCluster):  # whose plans are jobs on CPU ranks
            self.precision = "fp32"
        for field, value in choices.items():
            setattr(self, field, value)
        self._guard = Guard(lambda problem: setattr(self, "problem", problem))
        self._fixed = HoldFixed(self.fix, self._guard.callback(self._take_filters))
        self.controls = {
            "Model and cluster": self._asked(),
            "Weights": self._measures(),
            "Hold fixed": self._fixed.controls,
        }
        self.screen = PlannerScreen(self.controls, TrainedPlan(self._guard))
        ready_s = START_S + ENOUGH * STEPS_S[0]  # until it says which axis costs most
        self.screen.train.description = f"Train a small version of this plan: about {ready_s:.0f} s"
        t.dlink((self, "model"), (self.screen.frame, "subject"))
        if self._own_model is None and cluster is None:
            together = {"model", "seq", "global_batch"}  # another model has other defaults of the two
            self.screen.frame.offer_copy(
                self, [name for name in OPTIONS if name != "chosen"], together=together
            )
        self.children = self.screen.children
        classed(self, "ss-lab", "ss-planner")
        self._wire()
        self._guard.callback(self.search)()

    def _kept(self) -> list[widgets.Widget | str]:
        screen = self.screen
        trained = [screen.trained.said, screen.trained.costs]
        return [
            screen.status,
            screen.problem,
            screen.chosen,
            *trained,
            screen.mesh,
            screen.mesh_words,
            screen.note,
        ]

    def _asked(self) -> dict[str, widgets.Widget]:
        given = {"device", "nodes"} if self._own_cluster is not None else set()
        controls = controls_for(self, [name for name in (*ASKED, BUDGET) if name not in given])
        classed(controls["software"], "ss-wide")
        return controls

    def _measures(self) -> dict[str, widgets.Widget]:
        sliders = {}
        for name, words in WEIGHTS.items():
            slider = widgets.FloatSlider(
                description=words,
                min=0,
                max=3,
                step=0.05,
                value=self.weights.get(name, 0.0),
                readout_format=".2f",
            )
            slider.tooltip = f"Weight of {words.lower()} in the ranking"
            slider.observe(self._guard.callback(self._take_weights), "value")
            sliders[name] = slider
        return sliders

    def _wire(self) -> None:
        callback = self._guard.callback
        self.observe(callback(self._change_machine), ["device", "software"])
        self.observe(callback(self._change_model), "model")
        self.observe(
            callback(self._change), [name for name in ASKED if name not in {"model", "device", "software"}]
        )
        self.observe(callback(self._change_fix), "fix")
        self.observe(callback(self.search), "unshipped")
        self.observe(callback(self._rank), "weights")
        self.observe(callback(self._draw), "chosen")
        self.observe(callback(self._draw), BUDGET)
        self.observe(lambda change: setattr(self.screen.problem, "value", change["new"]), "problem")
        t.link((self, "unshipped"), (self.screen.unshipped, "value"))
        self.screen.pick.observe(callback(self._take_pick), "value")
        self.screen.by.observe(callback(self._draw_mesh), "value")
        self.screen.table.observe(callback(self._take_row), "chosen")
        self.screen.scatter.observe(callback(self._take_point), "clicked")
        self.screen.measured.use.on_click(callback(self._take_measured))
        # Without the lock: `on_train` opens another panel of a lab, whose lock a picture of the lab takes first.
        self.screen.train.on_click(callback(self._press_train, lock=False))
        self.screen.measured.forget.on_click(callback(self.forget))

    def _take_weights(self) -> None:
        weights = {name: slider.value for name, slider in self.controls["Weights"].items() if slider.value}
        self.weights = weights or {"time": 1.0}

    def _take_filters(self) -> None:
        self.fix = self._fixed.applied_to(self.fix)

    def _take_pick(self) -> None:
        if not self._is_filling and self.screen.pick.value is not None:
            self.chosen = self.screen.pick.value

    def _take_row(self) -> None:
        self.chosen = self.screen.table.chosen

    def _take_point(self) -> None:
        if self.plans is None:
            return
        place = (self.plans.order == self.screen.scatter.clicked).nonzero()[0]
        if len(place):
            self.chosen = int(place[0]) + 1

    @property
    def transformer(self) -> Transformer:
        """The chosen model, with its own sequence length."""
        own = self._own_model
        return own if own is not None and own.name == self.model else known_model(self.model)

    def _take_model(self) -> None:
        """Set sequence length and global batch to the defaults of the chosen model."""
        with self._filling(), suppress(ShardscopeError):  # an unknown model is reported by the search
            self.seq = self.transformer.seq
            self.global_batch = default_batch(self.transformer, self._own_cluster)

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """Set controls without triggering the callbacks for user input."""
        self._is_filling = True
        try:
            yield
        finally:
            self._is_filling = False

    def _change_model(self) -> None:
        self._take_model()
        self.search()

    def _change(self) -> None:
        if not self._is_filling:
            self.search()

    def _change_fix(self) -> None:
        self._fixed.show(self.fix)
        self.search()

    def _change_machine(self) -> None:
        self.measured = []
        self.search()

    def _take_measured(self) -> None:
        self.measure(self.screen.measured.seconds.value)

    def measure(self, step_time_s: float, *, rank: int | None = None) -> None:
        """Calibrate the cluster with a measured step of a plan, and predict and rank all plans again.

        Further steps refine the calibration. Changing the device or the framework discards them.

        Args:
            step_time_s: Measured time of one optimizer step, in seconds.
            rank: Position of the plan in the ranking, from 1; None for the chosen plan.

        Raises:
            SpecError: The time is not above 0 or not plausible, no plan has this rank, or the cluster is emulated.

        Example:
            >>> planner.measure(60.5)  # doctest: +SKIP
            >>> planner.plans.setting.calibration  # doctest: +SKIP
        """
        if self.plans is None or not len(self.plans):
            raise SpecError("there is no plan to measure; change the inputs so that a layout fits")
        if isinstance(self._own_cluster, EmulatedCluster):
            raise SpecError(
                "steps on an emulated cluster are predicted with this machine's calibration; calibrate the machine "
                "with ss.calibrate() instead"
            )
        step = measured_step(self.plans, self.chosen if rank is None else rank, step_time_s)
        calibration_of_steps(
            [*self.measured, step], self.plans.setting.cluster
        )  # raises before anything changes
        self.measured = [*self.measured, step]
        self.search()
        self._choose(step.layout)

    def train(self, *, rank: int | None = None) -> Run:
        """Train a small model with the axes of a plan on real ranks of this machine, as the button does.

        The ranks run on an emulated cluster whose links and processors are as slow in proportion as planned; see
        `Plans.rehearsal`. If this machine cannot emulate clusters, they run directly on it. A small job that this
        panel started before is stopped first.

        Args:
            rank: Position of the plan in the ranking, from 1; None for the chosen plan.

        Raises:
            SpecError: There is no such plan, or no job corresponds to it.
            ShardscopeError: The ranks cannot be started.
        """
        from shardscope.prediction.job import predict_job
        from shardscope.runtime import launch
        from shardscope.runtime.emulated import why_not_emulated

        plans = self.plans  # which another search may replace meanwhile
        if plans is None or not len(plans):
            raise SpecError("there is no plan to train; change the inputs so that a layout fits")
        place = self._shown if rank is None else rank
        planned = plans.ranked(place)
        is_job = isinstance(self._own_cluster, EmulatedCluster)  # which is trained on all of its ranks
        found = _rehearsal(plans, place, None if is_job else min(planned.num_devices, MOST_TRAINED))
        why_not = why_not_emulated()
        cluster = None if why_not else found.cluster
        prediction = predict_job(found.job, cluster)
        self.screen.trained.end()
        run = launch(found.job, cluster)
        where = (
            f"It runs directly on this machine, which cannot emulate clusters: {why_not}." if why_not else ""
        )
        self.screen.trained.watch(Trained(planned, found, prediction, run, where))
        if self.on_train is not None:
            self.on_train(found, run)
        return run

    def _press_train(self) -> None:
        self.problem = ""
        self.screen.trained.say("Predicting a small job with this plan's axes of parallelism …")
        self.screen.train.disabled = True
        try:
            self.train()
        except ShardscopeError as error:
            self.screen.trained.say(
                f"No small version of this plan can be trained: {as_in_form(str(error))}."
            )
        finally:
            self.screen.train.disabled = False

    def close(self) -> None:
        """Close the planner; a run of a plan continues."""
        if hasattr(self, "screen"):
            self.screen.trained.close()
        super().close()

    def forget(self) -> None:
        """Forget all measured steps, and predict and rank all plans again without them."""
        self.measured = []
        self.search()

    def _choose(self, layout: Layout) -> None:
        """Choose the plan with this layout, if it is in the table."""
        assert self.plans is not None
        place = next((plan.rank for plan in self.plans if plan.layout == layout), 1)
        self.chosen = place

    def search(self) -> None:
        """Search again with the current inputs."""
        self.problem, self.plans = "", None
        self.screen.say("Searching …", state="running")
        try:
            self._search()
        finally:
            if self.plans is None:
                self.screen.say("These inputs allow no plan.", state="failed")
                self.screen.draw_failed()

    def _search(self) -> None:
        cluster = self._own_cluster or Cluster.of(self.device, nodes=self.nodes)
        search = partial(
            plan, self.transformer.replace(seq=self.seq), cluster, self.weights, global_batch=self.global_batch,
            fix=self.fix, precision=self.precision, software=self.software or None,
            calibration=None
            if isinstance(cluster, EmulatedCluster)
            else calibration_of_steps(self.measured, cluster),
        )  # fmt: skip
        found = search()
        self.screen.unshipped.description = as_in_form(_unshipped_words(found))
        if self.unshipped and found.limits is not None:
            wider = search(space=SearchAxes(**dict(found.limits.wider)))
            is_offloaded = all(plan.layout.offload != "none" for plan in wider)
            found = replace(wider, needs_offload=found.needs_offload and is_offloaded)
        self.plans = found
        self.screen.draw_search(found)
        self.screen.measured.show(self.measured, found)
        self._show_first()

    def _rank(self) -> None:
        if self.plans is None or isinstance(self._own_cluster, EmulatedCluster):
            self.search()  # on an emulated cluster, the weights decide which jobs are predicted
            return
        self.problem = ""
        self.plans = self.plans.by(self.weights)
        self._show_first()

    @property
    def tokens(self) -> float:
        """Number of tokens to train on."""
        return float(self.tokens_billions) * 1e9

    def _show_first(self) -> None:
        """Choose the recommended plan."""
        assert self.plans is not None
        first = recommended(self.plans).rank if len(self.plans) else 1
        with self._filling():
            self.screen.offer(self.plans, first)
        if self.chosen == first:
            self._draw()
        else:
            self.chosen = first

    @property
    def _shown(self) -> int:
        """Position of the plan that is shown; the last plan if the chosen plan does not exist."""
        assert self.plans is not None
        return min(self.chosen, len(self.plans.order))

    def _draw(self) -> None:
        if self.plans is None:
            return
        if not len(self.plans):
            self.screen.say(_plan_answer.verdict(self.plans), state="failed")
            self.screen.draw_nothing()
            return
        chosen = self._shown
        with self._filling():
            self.screen.draw_ranking(self.plans, chosen, tokens=self.tokens)
        self.screen.draw_chosen(self.plans, chosen, self.plans.explain(chosen, 1) if chosen > 1 else None)
        self._draw_mesh()

    def _draw_mesh(self) -> None:
        if self._is_filling or self.plans is None or not len(self.plans):
            return
        info = _plan_mesh.plan_mesh_info(self.plans, self._shown, by=self.screen.by.value or "")
        with self._filling():
            self.screen.draw_mesh(info)


def _rehearsal(plans: Plans, rank: int, world_size: int | None) -> Rehearsal:
    """Return the rehearsal of a plan with the shortest steps of `STEPS_S` in which this machine keeps up."""
    for step_s in STEPS_S[:-1]:
        try:
            return _recorded_first(
                plans.rehearsal(rank, world_size=world_size, step_s=step_s, steps=NUM_STEPS)
            )
        except SpecError as error:
            if not str(error).startswith("step_s="):
                raise
    return _recorded_first(plans.rehearsal(rank, world_size=world_size, step_s=STEPS_S[-1], steps=NUM_STEPS))


def _recorded_first(found: Rehearsal) -> Rehearsal:
    """Return a rehearsal that records memory and messages in its first step, whose time is not counted."""
    return replace(found, job=found.job.replace(record=Record(memory_first=1, messages_first=1)))


def _unshipped_words(found: Plans) -> str:
    """Return the checkbox label: what the frameworks do not ship, and the step time that it would save."""
    named = [software_of(name).label for name in found.software if name]
    who = f"{named[0]} does" if len(named) == 1 else "the frameworks do"
    words = f"Also search settings that {who} not support"
    if not len(found):
        return words
    saved = 0.0 if found.beyond is None else 1 - found.beyond.step_time_s / float(found.step_time_s.min())
    if found.beyond is None or saved < LEAST_SAVED:
        return f"{words}: none would be faster"
    return f"{words}: {found.beyond.lacking} would make the step {saved:.0%} shorter"
