"""Choices of the Tuning Lab other than the job, as traits. No widgets here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import traitlets as t

from shardscope.spec import Job, Link
from shardscope.tuning.objectives import OBJECTIVES
from shardscope.tuning.samplers import SAMPLERS
from shardscope.tuning.session import StudySession
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.kit.form import check_options, named, own_trait

BANDWIDTHS = tuple(
    f"{value} {unit}"
    for unit, values in (("Mbit/s", (10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700)),
                         ("Gbit/s", (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)))
    for value in values
)  # fmt: skip
LATENCIES = ("0 s", "5 us", "10 us", "20 us", "50 us", "0.1 ms", "0.2 ms", "0.5 ms", "1 ms", "2 ms", "5 ms", "10 ms",
             "20 ms", "50 ms")  # fmt: skip


class StudyChoices(JobChoices):
    """One trait per control. Setting a trait updates its control, and using the control sets the trait."""

    name = own_trait(
        "",
        "Study",
        "Name of the study; an existing study is opened again, on this machine or from its storage.",
    )
    objectives = t.List(t.Unicode(), help="Objectives to minimise.")
    trials = own_trait(24, "Trials", "Total number of trials in the study.", least=1, reach=100_000)
    parallel = own_trait(1, "In parallel", "Number of trials that run at the same time.", least=1, reach=64)
    sampler = own_trait(
        "auto",
        "Sampler",
        "Sampler that chooses the settings: a name, or an Optuna sampler object.",
        kind="other",
        values=named(SAMPLERS),
    )
    baselines = own_trait(
        True,
        "Baselines",
        "First run the unchanged job, AdamW and SGD with Nesterov momentum at their usual learning rates, and settings "
        "from the literature. The sampler draws only the optimizers that are picked above, each equally often.",
    )
    search = t.Dict(
        help="By name of a setting: whether it is searched, and the indices of its picked options."
    )
    x = own_trait("seconds", "x-axis", "Objective on the x-axis.", values=named(OBJECTIVES))
    y = own_trait("loss", "y-axis", "Objective on the y-axis.", values=named(OBJECTIVES))
    colour = own_trait("bytes", "Colour", "Objective shown as colour.", values=named(OBJECTIVES))
    is_relinked = own_trait(
        False,
        "Another link",
        "Show the times of finished trials as predicted for another link, without new runs.",
    )
    on_bandwidth = own_trait(
        "100 Mbit/s",
        "Bandwidth",
        "Bandwidth of the other link, at which each rank sends and receives.",
        values=named(BANDWIDTHS),
        slider="s",
    )
    on_latency = own_trait(
        "1 ms",
        "Latency",
        "Extra latency of every message on the other link.",
        values=named(LATENCIES),
        slider="s",
    )
    chosen = t.Int(-1, help="Number of the trial that is shown; -1 for none.")
    applied = t.Instance(Job, allow_none=True, help="Job of the trial that was last applied.")

    def choose(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Set the named traits, as in ``{"lr": 0.01}``, and return the remaining arguments for `StudySession.open`.

        Raises:
            TypeError: A name is neither a trait nor an argument of `StudySession.open`.
        """
        if not isinstance(choices, Mapping):
            raise TypeError(
                f"lab.choose({choices!r}) needs a mapping; write lab.choose({{'lr': 0.01}}), or lab.chosen = 2 to "
                "show trial 2"
            )
        traits = {*JobChoices.class_own_traits(), *StudyChoices.class_own_traits()} - {"applied"}
        passed = set(inspect.signature(StudySession.open).parameters) - {"job", "space", "name"}
        check_options("TuningLab", choices, traits | passed)
        for field, value in choices.items():
            if field in traits:
                setattr(self, field, value)
        return {field: value for field, value in choices.items() if field not in traits}

    def other_link(self) -> Link | None:
        """Return the link for which times are predicted; None shows measured times."""
        return Link(bandwidth=self.on_bandwidth, latency_s=self.on_latency) if self.is_relinked else None
