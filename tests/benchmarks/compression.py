"""What compression is worth on a slow link, said beforehand and then run.

    python tests/benchmarks/compression.py [steps]

A small GPT on 4 ranks, each held to a link of 100 Mbit/s. First the prediction: a short unpaced probe, the codecs
measured here, the rest by formula. Then the runs: how long the uncompressed one takes to its final loss, how much
sooner each compressor is there, and how far the predicted step was from the measured one. Last, the verdict on the
machine's own link, against runs on it; and for four methods, two links either side of their crossing.
"""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
LAST = 5
METHODS = ("int8", "int4", "sign", "topk", "powersgd")
SLOW = ss.Link(bandwidth="100 Mbit/s", latency="1 ms")
JOB = ss.Job(
    model="gpt-mini", data="python-source", strategy="ring", world_size=4, batch=8, steps=STEPS,
    optimizer=ss.Optimizer("adamw", lr=1e-3),
)  # fmt: skip


def steps(run: ss.Run) -> tuple[list[float], list[float]]:
    """Loss and seconds of every step; the slowest rank's time counts."""
    columns = run.reduced().steps
    return list(columns.column("loss")), list(columns.column("step_time_s"))


def finish(job: ss.Job) -> tuple[list[float], list[float]]:
    """Run a job to its end."""
    return steps(ss.launch(job).wait(timeout=900))


def seconds_to(target: float, losses: list[float], times: list[float]) -> float | None:
    """When the mean of the last few losses is down to `target`; None if never."""
    for step in range(LAST, len(losses) + 1):
        if fmean(losses[step - LAST : step]) <= target:
            return sum(times[:step])
    return None


def time_to_loss() -> None:
    """The runs on the slow link."""
    predicted = ss.compression_speedup(JOB.replace(link=SLOW), methods=METHODS)
    print(predicted)
    steps_of_method = {step.compression.name: step for step in predicted.steps}
    target = whole = 0.0
    for name in ("none", *METHODS):
        job = JOB.replace(compression=name, link=SLOW, steps=STEPS if name == "none" else 2 * STEPS)
        losses, times = finish(job)
        if name == "none":
            target, whole = fmean(losses[-LAST:]), sum(times)
        took, measured, said = (
            seconds_to(target, losses, times),
            median(times[2:]),
            steps_of_method[name].step_s,
        )
        sooner = "never" if took is None else f"{took:7.1f} s, {whole / took:5.2f} times sooner"
        print(
            f"{name:10} step {measured:6.3f} s, predicted {said:6.3f} s ({said / measured:5.2f}); "
            f"to loss {target:.3f}: {sooner}"
        )


def on_the_machine() -> None:
    """The verdict without a link, and the runs."""
    predicted = ss.compression_speedup(JOB, methods=METHODS)
    print(predicted)
    for step in predicted.steps:
        _, times = finish(JOB.replace(compression=step.compression, steps=12))
        measured = median(times[2:])
        print(f"{step.compression.name:10} step {measured:6.3f} s, predicted {step.step_s:6.3f} s")


def either_side() -> None:
    """Two bandwidths either side of the crossing, two ranks, runs interleaved."""
    job = JOB.replace(world_size=2, batch=4, steps=10)
    found = ss.compression_speedup(job.replace(link=SLOW), methods=("bf16", "int8", "int4", "powersgd"))
    for method in found.steps[1:]:
        level = found.crossing(method)
        if not 0 < level < inf:
            continue
        for factor, claim in ((1 / 4, "pays"), (4.0, "does not pay")):
            link = ss.Link(bandwidth=level * factor, latency="1 ms")
            pairs = []
            for _ in range(3):
                plain, packed = (
                    median(finish(job.replace(compression=one, link=link))[1][2:])
                    for one in (ss.Compression("none"), method.compression)
                )
                pairs.append(packed / plain)
            ratio = median(pairs)
            print(
                f"{method.compression.name:10} crossing {8 * level / 1e6:6.0f} Mbit/s; at {link.label}: {claim}; "
                f"measured {ratio:5.2f} of the uncompressed step"
            )


if __name__ == "__main__":
    time_to_loss()
    on_the_machine()
    either_side()
