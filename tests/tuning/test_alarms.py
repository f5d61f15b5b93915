"""What a study keeps of its trials' layers."""

from __future__ import annotations

from dataclasses import replace

import shardscope as ss
from shardscope.commands.tune import as_dict
from shardscope.tuning import report
from shardscope.tuning.session import StudySession

JOB = ss.Job(
    model="mlp", data="digits", strategy="ring", world_size=2, steps=8, optimizer=ss.Optimizer("lamb", clamp=0.5)
)  # fmt: skip


def test_the_alarms_of_a_trial_are_in_its_record_and_in_the_report() -> None:
    ss.tune(
        JOB, {"optimizer.lr": (1e-3, 2e-3)}, trials=1, name="alarms", objectives=["loss"], baselines=False
    )
    session = StudySession.open(name="alarms")
    [record] = session.records()
    assert session.trial_run(0).job.record.layers_every == 1  # short trials are looked into more often
    [alarm] = session.trial_run(0).layers().alarms
    assert record.alarms == (str(alarm),)
    assert session.report().alarms == ((0, str(alarm)),)
    assert f"Alarm in trial 0: {alarm}." in str(session.report())
    assert as_dict(session, [record])["trials"][0]["alarms"] == [str(alarm)]
    # the front's first, the rest counted
    many = replace(session.report(), alarms=tuple((number, f"alarm {number}") for number in range(7, -1, -1)))
    told = str(many).splitlines()[-(report._MOST_ALARMS + 1) :]
    assert told[0] == "Alarm in trial 0: alarm 0."
    assert told[-1] == "And 3 more, in StudyReport.alarms."
