"""The Tuning Lab's link slider against the truth: finished trials re-projected, the same jobs run on the link.

    python tests/benchmarks/tuning_links.py [steps]

A study's trials with no compression, int8 and top-k run on the machine's own link. Each is re-projected onto links by
the code that the slider calls, and its job is run again with its ranks held to the link. Printed is projected over
measured; the bar is 15 % either way. Trial and paced runs alternate, so that a busy moment of the machine meets both;
each ratio is the median of `ROUNDS`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from statistics import median

from torch import nn

import shardscope as ss
from shardscope.tuning.session import StudySession
from shardscope_widgets.figures._trials import trials_info
from shardscope_widgets.tuning_lab._relink import Relinker

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
ROUNDS = 3
METHODS = ("none", "int8", "topk")
LINKS = (ss.Link(bandwidth="30 Mbit/s", latency="2 ms"), ss.Link(bandwidth="200 Mbit/s", latency="5 ms"))


def make_model() -> nn.Module:
    wide = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), *wide, nn.Linear(512, 10))


JOB = ss.Job(model=make_model, data="digits", strategy="ring", world_size=2, batch=32, steps=STEPS)


def trial(method: str, root: str, round_: int) -> tuple[StudySession, int]:
    """A study of one trial with this compression, run on the machine's own link."""
    session = StudySession.open(
        JOB, {"compression": [method]}, trials=1, name=f"{method}-{round_}", root=root
    )
    session.run()
    return session, session.front()[0].number


def projected(session: StudySession, link: ss.Link) -> float:
    """Seconds of a step, by the slider's own code."""
    objectives = session.definition.objectives
    trials = trials_info(session.records(), objectives, steps_of=lambda _: STEPS)
    found = Relinker(session.job).onto(trials, objectives, link)[0]
    return found.values["seconds"] / STEPS


def main() -> None:
    root = tempfile.mkdtemp()
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for round_ in range(ROUNDS):
        for method in METHODS:
            session, number = trial(method, root, round_)
            for link in LINKS:
                job = session.job(number).replace(link=link)
                measured = ss.launch(job, root=root).wait(300).summary().step_time_s
                assert measured is not None
                ratios.setdefault((method, link.label), []).append((projected(session, link), measured))
    print(
        f"load {os.getloadavg()[0]:.1f}; projected and measured step, median of {ROUNDS}; ratio of each round"
    )
    worst = 0.0
    for (method, label), pairs in ratios.items():
        told, took = (1e3 * median(column) for column in zip(*pairs, strict=True))
        each = [one / other for one, other in pairs]
        worst = max(worst, abs(median(each) - 1))
        rounds = "  ".join(f"{ratio:.3f}" for ratio in each)
        print(f"{method:6} {label:18} {told:8.1f} ms / {took:8.1f} ms = {median(each):.3f}   ({rounds})")
    print(f"worst {worst:.1%}; the bar is 15 %")


if __name__ == "__main__":
    main()
