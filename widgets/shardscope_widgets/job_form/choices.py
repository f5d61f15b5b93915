"""The inputs of the Training Lab as traits, and the job that they describe. This module contains no widgets."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import traitlets as t

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import (
    Batch,
    Checkpoint,
    Compression,
    Job,
    Link,
    LRSchedule,
    Method,
    Optimizer,
    Record,
    Recovery,
    Strategy,
    registry,
)
from shardscope.spec.data import DATA, is_path
from shardscope.spec.models import MODELS, transformer_of
from shardscope.spec.shards import Shards
from shardscope.spec.units import parse
from shardscope_widgets.job_form.families import applies, options_of
from shardscope_widgets.kit.form import (
    UNSET,
    form_of,
    named,
    option_of,
    own_trait,
    setting_in,
    trait_of,
    traits_for,
)

AS_IT_IS = "as it is"
"""Value of `bandwidth` for the machine's own link, whose speed is not limited."""
NO_LATENCY = "0"
BANDWIDTHS = (AS_IT_IS, "10 Mbit/s", "50 Mbit/s", "100 Mbit/s", "500 Mbit/s", "1 Gbit/s", "5 Gbit/s")
LATENCIES = (NO_LATENCY, "0.1 ms", "1 ms", "5 ms", "20 ms", "100 ms")
LEFT_TO_CODE = ("name", "device", "transport", "threads", "timeout_s", "until", "eval_every", "clip_norm")
"""Fields of a job that can only be set in code; every other field that a form can show has a control."""
KINDS: dict[str, type[Method]] = {"strategy": Strategy, "compression": Compression, "lr_schedule": LRSchedule}
"""Traits whose value is the name of a method, with the base class of the method.

Names are looked up when they are needed, because users can register more methods."""
_ORDER = ("pipeline", "data", "context", "tensor", "expert")
"""Axes of a mesh in the order of their controls."""
MICRO_BATCHES = ((f"{UNSET} (suits the strategy)", 0), *named((1, 2, 4, 8, 16, 32, 64)))


def known_names(field: str) -> tuple[str, ...]:
    """Return the names that are currently valid for the trait `field`."""
    return tuple(name for _, name in setting_in(JobChoices, field).values)


@form_of(Job, without=LEFT_TO_CODE)
class JobChoices(t.HasTraits):
    """One trait per control. Setting a trait updates its control, and using the control sets the trait."""

    def __init__(self, *args: Any, **traits: Any) -> None:
        self._left: dict[tuple[str, str], dict[str, Any]] = {}
        super().__init__(*args, **traits)

    model = trait_of(Job, "model", default="gpt-nano", values=named(MODELS))
    data = trait_of(Job, "data", default="python-source", values=named(DATA))
    strategy = trait_of(Job, "strategy")
    strategy_options = t.Dict(
        key_trait=t.Unicode(), help="Settings of the strategy that differ from its defaults, by name."
    )
    world_size = trait_of(Job, "world_size", "Ranks", most=64)
    optimizer = trait_of(Job, "optimizer")
    lr = trait_of(Optimizer, "lr", "Learning rate")
    lr_schedule = trait_of(Job, "lr_schedule", "LR schedule")
    lr_schedule_options = t.Dict(
        key_trait=t.Unicode(), help="Settings of the schedule that differ from its defaults, by name."
    )
    global_batch = trait_of(Batch, "global_batch", default=32)
    micro_batch = trait_of(
        Batch, "micro_batch", "Micro-batch", default=0, least=0, optional=False, values=MICRO_BATCHES
    )
    shares = own_trait(
        "",
        "Shares of the batch",
        "Shares of the data ranks in the global batch, such as 2, 2, 1, 1; or measured, by their measured speed; empty "
        "for equal shares.",
    )
    compression = trait_of(Job, "compression")
    compression_options = t.Dict(
        key_trait=t.Unicode(), help="Settings of the compression that differ from its defaults, by name."
    )
    bandwidth = own_trait(
        AS_IT_IS,
        "Link",
        "Bandwidth limit for each rank, enforced as it sends and receives, such as 100 Mbit/s.",
        values=(("this machine's own", AS_IT_IS), *named(BANDWIDTHS[1:])),
    )
    latency = own_trait(
        NO_LATENCY,
        "Latency",
        "Extra latency of every message, such as 1 ms; needs a bandwidth.",
        values=(("none", NO_LATENCY), *named(LATENCIES[1:])),
    )
    precision = trait_of(Job, "precision")
    recompute = trait_of(Job, "recompute")
    checkpoint_every = own_trait(
        0,
        "Checkpoint every",
        "Number of steps between two checkpoints; a run can resume from its newest one.",
        blank="none",
        least=0,
    )
    restarts = own_trait(
        0,
        "Restarts",
        "How many times all ranks may restart from the newest checkpoint after one of them has failed.",
        least=0,
        most=1000,
    )
    elastic = own_trait(
        "",
        "Elastic",
        "Minimum and maximum number of ranks, such as 2:4, to which the run can be resized while it "
        "trains; empty for a fixed number.",
    )
    noise_scale = trait_of(Record, "noise_scale", values=(("off", False), ("measured", True)))
    steps = trait_of(Job, "steps", default=200)
    seed = trait_of(Job, "seed")

    @t.validate("model", "data", "optimizer")
    def _known(self, proposal: Mapping[str, Any]) -> Any:
        field, value = proposal["trait"].name, proposal["value"]
        is_own_data = isinstance(value, Shards) or (isinstance(value, str) and is_path(value))
        free = callable(value) or (field == "data" and is_own_data)
        if not free and value not in known_names(field):
            raise unknown_name(field, value, known_names(field))
        return value

    @t.validate(*KINDS)
    def _known_kind(self, proposal: Mapping[str, Any]) -> Any:
        """Store the options of the previous method, so that selecting it again restores them.

        A short string such as ``pipeline:gpipe`` also sets the option after the colon.
        """
        field, asked = proposal["trait"].name, proposal["value"]
        self._left[field, getattr(self, field)] = getattr(self, f"{field}_options")
        if asked in known_names(field):
            return asked
        made = KINDS[field].by_name(asked)
        self._left[field, made.name] = options_of(made)
        if made.name == getattr(self, field):
            setattr(self, f"{field}_options", self._left[field, made.name])
        return made.name

    @t.observe(*KINDS)
    def _options_of_kind(self, change: Mapping[str, Any]) -> None:
        field = change["name"]
        try:
            setattr(self, f"{field}_options", self._left.get((field, change["new"]), {}))
        except t.TraitError:  # the user has redefined the method's class without these options
            setattr(self, f"{field}_options", {})

    @t.validate(*(f"{field}_options" for field in KINDS))
    def _possible_options(self, proposal: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options as normalised by the method, without those that are None.

        Raises:
            TraitError: The method rejects the options.
        """
        given = {field: value for field, value in proposal["value"].items() if value is not None}
        field = proposal["trait"].name.removesuffix("_options")
        if "name" in given:
            raise t.TraitError(
                f"{field}_options: name={given['name']!r} is not an option; set {field} instead"
            )
        try:
            made = self._made(field, given)
        except SpecError as error:
            raise t.TraitError(str(error)) from None
        return {
            name: option_of(getattr(made, name)) if name in made.changed else given[name] for name in given
        }

    def method(self, field: str) -> Any:
        """Return the method currently selected for `field`, with its options.

        Args:
            field: ``strategy``, ``compression`` or ``lr_schedule``.
        """
        return self._made(field, getattr(self, f"{field}_options"))

    def _made(self, field: str, options: Mapping[str, Any]) -> Any:
        """Create the method without the options that do not apply given the other options; those remain stored."""
        kind, name = KINDS[field], getattr(self, field)
        chosen = {**kind.by_name(name).settings, **options}
        return kind.by_name(name, **{each: v for each, v in options.items() if applies(each, chosen)})

    def method_options(self, field: str) -> dict[str, Any]:
        """Return all options of the method currently selected for `field`, including defaults, by name."""
        usual = KINDS[field].by_name(getattr(self, field)).settings
        changed: dict[str, Any] = getattr(self, f"{field}_options")
        return {name: option_of(value) for name, value in usual.items()} | changed

    def set_method_option(self, field: str, setting: str, value: Any) -> None:
        """Set one option of the method currently selected for `field`.

        Args:
            field: ``strategy``, ``compression`` or ``lr_schedule``.
            setting: Name of the option.
            value: Its new value; the default removes it from the changed options.

        Raises:
            TraitError: The method rejects the value.
        """
        usual = option_of(KINDS[field].by_name(getattr(self, field)).settings[setting])
        rest = {name: other for name, other in getattr(self, f"{field}_options").items() if name != setting}
        setattr(self, f"{field}_options", rest if value == usual else {**rest, setting: value})

    @t.observe("model")
    def _data_for_model(self, _change: object) -> None:
        if not self._fit():
            self.data = next(name for name, info in DATA.items() if info.gives == MODELS[self.model].reads)

    @t.observe("data")
    def _model_for_data(self, _change: object) -> None:
        if not self._fit():
            self.model = next(
                name for name, config in MODELS.items() if config.reads == DATA[self.data].gives
            )

    def _fit(self) -> bool:
        both_known = self.model in MODELS and self.data in DATA
        return not both_known or MODELS[self.model].reads == DATA[self.data].gives

    @t.observe("optimizer")
    def _default_lr(self, _change: object) -> None:
        self.lr = Optimizer(name=self.optimizer).lr

    @t.observe("bandwidth")
    def _latency_of_link(self, change: Mapping[str, Any]) -> None:
        """Reset the latency when the machine's own link is chosen, and restore it when a bandwidth is chosen again."""
        if change["new"] == AS_IT_IS:
            self._latency, self.latency = self.latency, NO_LATENCY
        elif change["old"] == AS_IT_IS and self.latency == NO_LATENCY:
            self.latency = getattr(self, "_latency", self.latency)

    @property
    def latency_s(self) -> float:
        """The latency in seconds; 0 may be given without a unit.

        Raises:
            SpecError: `latency` is not a time.
        """
        return 0.0 if self.latency in {NO_LATENCY, "0.0"} else parse(self.latency, "s", field="latency")

    def link(self) -> Link | None:
        """Return the link that limits the speed of the ranks' traffic; None to use the machine's own link.

        Raises:
            SpecError: The bandwidth or the latency is invalid, or a latency is given without a bandwidth.
        """
        latency_s = self.latency_s
        if self.bandwidth != AS_IT_IS:
            return Link(bandwidth=self.bandwidth, latency_s=latency_s)
        if latency_s:
            raise SpecError(
                f"latency={self.latency!r} needs a bandwidth, because a link is defined by both; "
                "set a bandwidth, such as bandwidth='100 Mbit/s', or set latency='0'"
            )
        return None

    @property
    def degrees(self) -> dict[str, int]:
        """Number of ranks along each axis of the chosen strategy, the outermost first; empty if it has one axis.

        Experts are distributed over data ranks. The context and expert axes are left out where the model has neither.
        """
        shape: dict[str, int] = self.method("strategy").shape(self.num_ranks)
        given = self.method_options("strategy") if shape else {}
        suits = {axis: given[axis] for axis in self._axes_of_model() if axis in given}
        used = {axis: ranks for axis in ("context", "expert") if (ranks := given.get(axis, 1)) > 1}
        found = shape | suits | used
        return {axis: found.pop(axis) for axis in _ORDER if axis in found} | found

    def _axes_of_model(self) -> tuple[str, ...]:
        """Return the axes, besides those of every model, over which the chosen model can be divided."""
        if self.model not in MODELS:
            return "context", "expert"  # a model of the user's own, which ranks examine
        transformer = transformer_of(self.model)
        if transformer is None:
            return ()
        return ("context",) if transformer.mixture is None else ("context", "expert")

    def set_degree(self, axis: str, ranks: int) -> None:
        """Set the number of ranks along an axis; the other axes keep theirs, so `world_size` changes with it.

        Args:
            axis: One of `degrees`; ``expert`` does not change the number of ranks.
            ranks: Its new number of ranks.

        Raises:
            TraitError: The strategy rejects the number, or there are too many ranks in total.
        """
        degrees = {**self.degrees, axis: ranks}
        world_size = prod(ranks for name, ranks in degrees.items() if name != "expert")
        most = setting_in(JobChoices, "world_size").most
        if most is not None and world_size > most:
            product = " x ".join(f"{name}={each}" for name, each in degrees.items() if name != "expert")
            raise SpecError(
                f"{product} are {world_size} ranks, but the form starts at most {most:g}; use fewer"
            )
        if isinstance(self.method_options("strategy").get(axis), int):
            self.set_method_option("strategy", axis, ranks)
        self.world_size = world_size

    @property
    def num_ranks(self) -> int:
        """Number of ranks that will run: the chosen number, limited by the strategy's maximum."""
        ranks: int = self.world_size
        return min(ranks, registry.require_known(Strategy, self.strategy).max_ranks or ranks)

    def job(self) -> Job:
        """Return the job that the choices describe.

        Raises:
            SpecError: The choices contradict each other; the message states what to change.
        """
        suited = self.method("strategy").suggested_micro_batch(self.global_batch, self.num_ranks)
        plain = {name: getattr(self, name) for name in traits_for(JobChoices, Job)}
        methods = {kind: self.method(kind) for kind in KINDS}
        parts = {
            "world_size": self.num_ranks,
            "optimizer": Optimizer(name=self.optimizer, lr=self.lr),
            "batch": Batch(
                global_batch=self.global_batch,
                micro_batch=self.micro_batch or suited,
                shares=self.shares.strip() or None,
            ),
            "link": self.link(),
            "record": Record(noise_scale=self.noise_scale),
            "checkpoint": Checkpoint(every=self.checkpoint_every or None),
            "recovery": Recovery(restarts=self.restarts) if self.restarts else None,
            "elastic": self.elastic.strip() or None,
        }
        return Job(**plain | methods | parts)
