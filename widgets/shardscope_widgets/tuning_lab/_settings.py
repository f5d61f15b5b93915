"""Choices of the Tuning Lab in addition to the job, as traits. No widgets here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import traitlets as t

from shardscope.spec import Job, Link
from shardscope.tuning.session import Session
from shardscope_widgets.job_form.choices import Choices


class StudyChoices(Choices):
    """One trait per control: setting the trait moves the control, and moving the control sets the trait."""

    name = t.Unicode(
        "", help="Of the study: the same name finds it again, on this machine or in its storage."
    )
    objectives = t.List(t.Unicode(), help="What is minimised, all of it.")
    trials = t.Int(24, min=1, help="Trials that the study is to have in all.")
    parallel = t.Int(1, min=1, help="Trials that run at once.")
    sampler = t.Any("auto", help="What chooses settings: by name, or one of Optuna's samplers.")
    search = t.Dict(
        help="By name of a setting: whether it is searched, and the places picked of its options."
    )
    x = t.Unicode("seconds", help="The objective across.")
    y = t.Unicode("loss", help="The objective up.")
    colour = t.Unicode("bytes", help="The objective that colours.")
    is_relinked = t.Bool(
        help="Show the times of finished trials as they would be on another link; nothing runs anew."
    )
    on_bandwidth = t.Unicode(
        "100 Mbit/s", help="Of the other link: what each rank may send and receive a second."
    )
    on_latency = t.Unicode("1 ms", help="Of the other link: how long every message takes besides.")
    chosen = t.Int(-1, help="Number of the trial that is looked at; -1 for none.")
    applied = t.Instance(Job, allow_none=True, help="The job of the trial that was last applied.")

    def choose(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        """Set the named traits, as in ``{"lr": 0.01}``; return the rest, which are arguments of `Session.open`.

        Raises:
            TypeError: A name is neither a trait nor such an argument.
        """
        if not isinstance(choices, Mapping):
            raise TypeError(
                f"lab.choose({choices!r}) names no setting; write lab.choose({{'lr': 0.01}}), or lab.chosen = 2 to "
                "look at trial 2"
            )
        traits = {*Choices.class_own_traits(), *StudyChoices.class_own_traits()} - {"applied"}
        passed = set(inspect.signature(Session.open).parameters) - {"job", "space", "name"}
        for field, value in choices.items():
            if field not in traits | passed:
                known = ", ".join(sorted(traits | passed))
                raise TypeError(f"TuningLab has no choice {field!r}; there are {known}")
            if field in traits:
                setattr(self, field, value)
        return {field: value for field, value in choices.items() if field not in traits}

    def other_link(self) -> Link | None:
        """Return the link that times are re-projected onto; None for times as measured."""
        return Link(bandwidth=self.on_bandwidth, latency_s=self.on_latency) if self.is_relinked else None
