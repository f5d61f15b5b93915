"""What a search finds and what pruning saves: tuned against random search and the defaults, dominance against none.

    python tests/benchmarks/tuning_search.py --root FOLDER             both tasks, three seeds; goes on where it stopped
    python tests/benchmarks/tuning_search.py --root FOLDER --show       only the tables of what there is
    python tests/benchmarks/tuning_search.py --root FOLDER --task digits --trials 30

Every trial is a real run at 2 ranks. Each study minimises loss and bytes over the default space of its job (optimizer,
rate, warm-up, the batches around its own, compression), at equal samples, for the same number of trials. Both repeat
to the bit, so but for pruning, which acts a moment later on a busy machine, every figure below does too. Measured
seconds are left out of the search: beside other work the same settings took from 1 to 40 times as long, and a search
would follow that noise. The seed is the sampler's and the job's. Arms:

    defaults   the job as it is: a single point
    random     random search over the same space
    tuned      what `ss.tune` does: TPE, begun with settings from the literature, optimizers at equal budget; not pruned
    pruned     the same with dominance pruning

Hypervolume: the share of the box between a reference point and the ideal point that a front covers. Loss goes from 0 to
that of guessing (the reference), linearly; bytes go from the least to the most that any finished trial of the task
sent, on a logarithmic axis, and so do seconds, where they are the third: those that the counted messages and bytes
take on the link, which depend on the settings alone.

Pruning is judged twice. Replayed: the trials of an unpruned study are shown to the pruner in their order, evaluation by
evaluation, with the figures that they had then. That compares the same trials, so what the front loses is the pruner's
doing alone. Live, tuned against pruned: other trials are drawn, so fronts differ by the search's luck, and lengths as
well, as large batches take fewer steps; told is what of its own trials' steps the pruned study did not take, and how
many fewer it took than the unpruned study. A verdict that comes later than a step takes costs as many as fit into the
time until it does, so that this figure alone may differ a little from one machine to another.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shardscope as ss
from shardscope.errors import StudyError
from shardscope.runtime import shut_down
from shardscope.spec.models import MODELS
from shardscope.tuning.measured import TrialMetrics, TrialReader, evaluated
from shardscope.tuning.pruning.pruners import Finished, ParetoPruner
from shardscope.tuning.records import TrialRecord
from shardscope.tuning.session import StudySession

SEEDS = (0, 1, 2)
OBJECTIVES = ("loss", "bytes")
WITH_SECONDS = ("loss", "bytes", "seconds")
LINK = ss.Link(bandwidth="100 Mbit/s", latency="0.2 ms")
ARMS = {
    "random": {"sampler": "random", "baselines": False, "pruner": "none"},
    "tuned": {"sampler": "tpe", "baselines": True, "pruner": "none"},
    "pruned": {"sampler": "tpe", "baselines": True, "pruner": "dominance"},
}
TRIALS = {"digits": 30, "gpt": 16}


def job_of(task: str, seed: int) -> ss.Job:
    """The job whose settings are searched."""
    model, data, batch, steps = (
        ("mlp", "digits", 64, 48) if task == "digits" else ("gpt-nano", "python-source", 8, 24)
    )
    return ss.Job(
        model=model, data=data, strategy="ring", world_size=2, batch=batch, steps=steps, link=LINK, seed=seed,
        lr_schedule=ss.LRSchedule("cosine", warmup_steps=steps // 10), name=f"search {task}",
        record=ss.Record(memory_first=0, memory_every=None, spans_first=0),
    )  # fmt: skip


@dataclass
class Arm:
    """One study of one task, arm and seed."""

    task: str
    arm: str
    seed: int
    root: Path

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm}-{self.seed}"

    def run(self, trials: int) -> None:
        """Run what is missing of it."""
        start = time.monotonic()
        session = StudySession.open(
            job_of(self.task, self.seed), trials=trials, objectives=OBJECTIVES, name=self.name, seed=self.seed,
            batch_range="job", root=self.root, **ARMS[self.arm],  # type: ignore[arg-type]
        )  # fmt: skip
        session.run()
        print(f"{self.name}: {time.monotonic() - start:.0f} s, {len(session.records())} trials", flush=True)

    def session(self) -> StudySession | None:
        """The study, if it has been begun."""
        try:
            return StudySession.open(name=self.name, root=self.root)
        except StudyError:
            return None


# What a front is worth.


@dataclass(frozen=True)
class Box:
    """Between the ideal point and the reference."""

    guessing: float
    low: dict[str, float]
    high: dict[str, float]

    @classmethod
    def of(cls, task: str, records: Sequence[TrialRecord]) -> Box:
        model = job_of(task, 0).model
        classes = 10 if task == "digits" else MODELS[str(model)].vocab  # type: ignore[union-attr]
        done = [record for record in records if record.values is not None]
        ends = {name: sorted(_figure(record, name) for record in done) for name in WITH_SECONDS[1:]}
        return cls(math.log(classes), {n: v[0] for n, v in ends.items()}, {n: v[-1] for n, v in ends.items()})

    def share(self, records: Sequence[TrialRecord], names: Sequence[str] = OBJECTIVES) -> float:
        """Of the box, that some trials' front covers."""
        points = [tuple(self._scaled(record, name) for name in names) for record in records if record.values]
        return hypervolume([point for point in points if max(point) < 1])

    def _scaled(self, record: TrialRecord, name: str) -> float:
        value = _figure(record, name)
        if name == "loss":
            return value / self.guessing
        low, high = self.low[name], self.high[name]
        return math.log(value / low) / math.log(high / low) * (1 - 1e-9)  # the worst one still counts


def _figure(record: TrialRecord, name: str) -> float:
    """Of a finished trial; seconds are those on the wire, by count."""
    assert record.values is not None
    assert record.measured is not None
    if name != "seconds":
        return record.values[name]
    ranks = 2
    return (record.measured.bytes / LINK.bandwidth + record.measured.messages * LINK.latency_s) / ranks


def hypervolume(points: Sequence[tuple[float, ...]]) -> float:
    """Volume between the points and (1, ..., 1) that they dominate, by slices along the last axis."""
    if not points:
        return 0.0
    if len(points[0]) == 1:
        return 1 - min(points)[0]
    volume, cuts = 0.0, sorted({point[-1] for point in points})
    for low, high in zip(cuts, [*cuts[1:], 1.0], strict=True):
        volume += (high - low) * hypervolume([point[:-1] for point in points if point[-1] <= low])
    return volume


# What pruning would have done to the same trials.


@dataclass(frozen=True)
class Replay:
    """An unpruned study, pruned afterwards."""

    steps: int
    saved: int
    kept: list[TrialRecord]
    pruned: int
    lost: list[int]
    """Trials of the unpruned front that were pruned."""

    @property
    def share(self) -> float:
        return self.saved / self.steps


def replay(session: StudySession, trials: Sequence[TrialRecord]) -> Replay:
    """Show the trials to the pruner, in their order."""
    pruner, finished, kept, steps, saved = (
        ParetoPruner(session.definition.replace(objectives=OBJECTIVES)),
        [],
        [],
        0,
        0,
    )
    for record in trials:
        if record.values is None:
            continue  # it failed: pruning saves nothing of it
        job = evaluated(session.job(record.number))
        steps += job.steps
        for measured in snapshots(session, record):
            if pruner.judge(measured, job, finished) is not None:
                saved += job.steps - measured.steps
                break
        else:
            kept.append(record)
            assert record.measured is not None
            finished.append(Finished(record.number, record.values, record.measured))
    left = {record.number for record in kept}
    lost = [number for number in nobody_beats(trials) if number not in left]
    return Replay(steps, saved, kept, len(trials) - len(kept), lost)


def nobody_beats(trials: Sequence[TrialRecord]) -> list[int]:
    """The front in loss and bytes, whatever else a study minimised."""
    points = {r.number: [r.values[name] for name in OBJECTIVES] for r in trials if r.values}
    return [
        n
        for n, point in points.items()
        if not any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True))
            for other in points.values()
        )
    ]


def snapshots(session: StudySession, record: TrialRecord) -> Iterator[TrialMetrics]:
    """What had been measured of a trial at each of its evaluations."""
    run = session.trial_run(record.number)
    events = run.events()
    times = [event["t"] for event in events if event["event"] == "eval" and event["rank"] == 0]
    for moment in times:
        meter = TrialReader(run)
        for event in events:
            if event["t"] <= moment:
                meter._take(event)
        meter._tail.poll()  # it has been told already
        yield meter.poll()


# Tables.


def tables(task: str, root: Path, seeds: Sequence[int]) -> None:
    """Print what there is of a task."""
    arms = {(arm, seed): Arm(task, arm, seed, root).session() for arm in ARMS for seed in seeds}
    sessions = {key: session for key, session in arms.items() if session is not None}
    trials = {
        key: [record for record in session.records() if record.counted and record.state != "waiting"]
        for key, session in sessions.items()
    }
    if not trials:
        return
    box = Box.of(task, [record for records in trials.values() for record in records])
    print(
        f"\n{task}: {job_of(task, 0).steps} steps of {job_of(task, 0).batch.global_batch}, {LINK.label}; box: ",
        end="",
    )
    print(
        f"loss below {box.guessing:.3f}, "
        + ", ".join(f"{n} {box.low[n]:.4g} to {box.high[n]:.4g}" for n in box.low)
    )
    _hypervolumes(box, trials)
    _savings(box, sessions, trials)


Trials = dict[tuple[str, int], list[TrialRecord]]


def _hypervolumes(box: Box, trials: Trials) -> None:
    print(
        f"  {'':9}{'seed':>5}{'trials':>8}{'done':>6}{'loss x bytes':>14}{'x seconds':>14}{'best loss':>11}"
    )
    by_arm: dict[str, list[tuple[float, float]]] = {}
    for (arm, seed), records in sorted(trials.items()):
        rows = {arm: records}
        if arm == "tuned":
            rows["defaults"] = [record for record in records if record.origin == "default"]
        for name, chosen in rows.items():
            shares = box.share(chosen), box.share(chosen, WITH_SECONDS)
            done = [record.values["loss"] for record in chosen if record.values]
            counts = f"{seed:5}{len(chosen):8}{len(done):6}"
            print(f"  {name:9}{counts}{shares[0]:14.4f}{shares[1]:14.4f}{min(done, default=math.nan):11.4f}")
            by_arm.setdefault(name, []).append(shares)
    for name, pairs in by_arm.items():
        told = [f"{mean(column):.4f} +- {_spread(column):.4f}" for column in zip(*pairs, strict=True)]
        print(f"  {name:9} over {len(pairs)} seeds: loss x bytes {told[0]}; x seconds {told[1]}")


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def _savings(box: Box, sessions: dict[tuple[str, int], StudySession], trials: Trials) -> None:
    for (arm, seed), records in trials.items():
        if arm == "pruned":
            _live(box, sessions[arm, seed], records, trials.get(("tuned", seed)), seed)
            continue
        result = replay(sessions[arm, seed], records)
        ratios = [box.share(result.kept, n) / box.share(records, n) for n in (OBJECTIVES, WITH_SECONDS)]
        print(
            f"  replayed  {arm:7} seed {seed}: {result.pruned} of {len(records)} pruned, {result.share:.1%} of "
            f"{result.steps} steps saved, hypervolume x {ratios[0]:.4f} (with seconds x {ratios[1]:.4f}), of the front "
            f"of {len(nobody_beats(records))} lost: {result.lost or 'none'}"
        )


def _live(
    box: Box,
    session: StudySession,
    records: Sequence[TrialRecord],
    others: Sequence[TrialRecord] | None,
    seed: int,
) -> None:
    judged = [
        record for record in records if record.measured is not None and record.state in ("complete", "pruned")
    ]
    steps = sum(session.job(record.number).steps for record in judged)
    ran = sum(record.measured.steps for record in judged if record.measured)
    pruned = sum(record.state == "pruned" for record in judged)
    ratio = math.nan if not others else box.share(records) / box.share(others)
    whole = sum(record.measured.steps for record in others or () if record.measured)
    fewer = 1 - ran / whole if whole else math.nan
    print(
        f"  live      pruned  seed {seed}: {pruned} of {len(judged)} pruned, {1 - ran / steps:.1%} of {steps} steps "
        f"saved, {fewer:.1%} fewer than the {whole} of the unpruned study, hypervolume x {ratio:.4f} of its"
    )


def main() -> None:
    """Run what is missing, then print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--task", choices=TRIALS, nargs="*", default=list(TRIALS))
    parser.add_argument("--arm", choices=ARMS, nargs="*", default=list(ARMS))
    parser.add_argument("--seed", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--trials", type=int)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    try:
        for task in args.task:
            for seed in args.seed if not args.show else ():
                for arm in args.arm:
                    Arm(task, arm, seed, args.root).run(args.trials or TRIALS[task])
            tables(task, args.root, args.seed)
    finally:
        shut_down()


if __name__ == "__main__":
    main()
