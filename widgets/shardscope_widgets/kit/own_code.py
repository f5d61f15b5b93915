"""Permission to call the user's own functions: given by one press of a button, for all panels of this kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as widgets

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.spec.job_parts import UserCode

_allowed: list[UserCode] = []
"""Functions that the user has allowed panels to call."""


def may_call(job: Job) -> bool:
    """Return whether the user has allowed all functions of a job to be called; True if it has none."""
    return all(code in _allowed for code in job.user_functions.values())


def allow(job: Job) -> None:
    """Allow the functions of a job to be called, from now on and in all panels."""
    _allowed.extend(code for code in job.user_functions.values() if code not in _allowed)


def predict_button() -> widgets.Button:
    """Return a hidden button that asks for the permission."""
    button = widgets.Button(description="Predict it", icon="calculator")
    button.tooltip = (
        "Predict this job: call its functions in this notebook kernel, and trace a step on the meta device"
    )
    button.layout.display = "none"
    return button
