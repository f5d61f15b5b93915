"""Launch a job: create a run directory, and send a request to the launch server."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Literal

from shardscope.errors import LaunchError, SpecError, quoted
from shardscope.runtime.agent.user_modules import beyond_current_folder, of_current_folder
from shardscope.runtime.launcher.driver_server import TOOLKIT, driver
from shardscope.runtime.record.about import About
from shardscope.runtime.record.launch_prediction import LaunchConstants, LaunchPrediction
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir, cluster_of, find_resumable, runs_root, unwritable
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job, registry
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.faults import Faults
from shardscope.spec.method import Method
from shardscope.spec.shards import Shards
from shardscope.storage.caches import limit_here
from shardscope.storage.rows import require_batch

_SERVERS = 2
"""Maximum number of launch servers that a launch tries before it fails."""
_CODECS = "shardscope.training.compression.ready"
"""Module that only runs with compression need; the server imports it when the first of these runs is launched."""

_CHECKPOINTS = "shardscope.training.checkpoint"
"""Module that ranks need to resume; restarted ranks should not wait for its import."""


def shut_down() -> None:
    """End the launch server, and all runs of this process except those launched with `detach`."""
    driver.close()


def launch(
    job: Job,
    cluster: EmulatedCluster | Literal["this machine"] | None = None,
    *,
    root: str | Path | None = None,
    resume: Run | str | Path | None = None,
    detach: bool = False,
    gated: bool = False,
    faults: Faults | str | None = None,
    preflight: bool = True,
    group: str | None = None,
    made_by: str | None = None,
) -> Run:
    """Start a job on this machine, one process per rank, and return without waiting for them.

    Args:
        job: The job to train.
        cluster: An emulated cluster to train on (`ss.Cluster.emulated`), with one rank per device, or
            ``"this machine"`` for this machine itself. None uses the cluster of the run to resume, or this machine
            without `resume`. Each node has its own agent, and ranks of different nodes send real TCP over
            rate-limited links. Ranks compute on CPU cores.
        root: Folder for the run directory; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        resume: A run, or its name or path, to resume from its newest intact checkpoint; or the path of one
            checkpoint (``.../checkpoints/step-20``). With the same job and number of ranks, a resumed run is
            bit-identical to an uninterrupted one. The exceptions are asynchronous and bounded-staleness parameter
            servers, whose order of updates depends on timing. A run that was on an emulated cluster, or a checkpoint in
            its directory, resumes on an equal cluster unless `cluster` is given.
        detach: Whether the run outlives this process. Otherwise it is stopped when this process ends.
        gated: Whether you end or continue the run after each evaluation, by `Run.stop` or `Run.approve`. Ranks wait for
            your decision, but no longer than a step takes, and not at all after two consecutive late decisions.
            Ranks that are not synchronous (asynchronous parameter servers, gossip) never wait.
        faults: Faults to inject during the run, such as ``ss.Faults().kill(rank=1, step=40)``, or their text.
            They are not part of the job. Each fault occurs once, even if a restart (`Job.recovery`) repeats
            its step.
        preflight: Whether to reject a job whose ranks are predicted not to fit in this machine's memory. This traces
            one step of each new model, which takes a few tenths of a second if this process or an earlier launch has
            already imported torch. A job with a model, data or loss function of your own is not checked. False starts
            the job without this check, and without recording its predicted step time (but with the constants for it).
        group: Name of a group of runs that are compared with each other; None groups runs by model and data. It is not
            part of the job, and `Run.group` can change it later.
        made_by: Name of the tool that launches the run for its own measurements, such as ``check``; `runs` hides such
        runs. None for a user's run.

    Raises:
        LaunchError: The cluster is not emulated, or cannot be emulated here. The job does not fit in memory, the
            run directory cannot be written, or the user's code cannot be sent to the ranks.
        RunNotFound: The run to resume does not exist.
        RunUnreadable: The cluster of the run to resume is unknown, because its file is corrupt.
        SpecError: `gated` is set for a job without evaluations, the job names a method that is not installed, or it
            does not suit the cluster (different number of ranks, its own link, a GPU). A fault cannot occur in this
            run. The data are sharded, and ``$SHARDSCOPE_CACHE_LIMIT`` is not a size.

    Example:
        >>> import shardscope as ss
        >>> run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", steps=20))  # doctest: +SKIP
        >>> run.wait().summary().test_accuracy  # doctest: +SKIP
    """
    if not isinstance(job, Job):
        raise LaunchError(f"launch takes a Job, got {type(job).__name__}; write ss.launch(ss.Job(...))")
    earlier = None if resume is None else _source(resume, root)
    job, on = _placed(job, cluster, earlier)
    for name, value in (("detach", detach), ("gated", gated), ("preflight", preflight)):
        if not isinstance(value, bool):
            raise SpecError(f"{name}={quoted(value)} is not a Boolean; give True or False")
    if gated and job.eval_every is None:
        raise SpecError(
            "gated=True has no effect on a job with eval_every=None; set the job's eval_every, for example to 10"
        )
    job.require_code()
    plan = Faults.of(faults)
    plan.check(job, on)
    _require_cache_limit(job)
    require_batch(job)
    predicted = _predicted(job, on, is_checked=preflight)
    said = {name: text for name, text in (("group", group), ("made_by", made_by)) if text is not None}
    about = About.checked(**said).fields() if said else {}
    run = RunDir.create(job, runs_root(root), gated=gated, about=about, cluster=on, faults=plan)
    try:
        if predicted is not None:
            predicted.write(run)
        _hand_over(run, _request(run, job, earlier, detach=detach))
    except BaseException as error:  # interrupts too, so that no run stays in state "starting" forever
        _give_up(run, error)
        raise
    return Run(run, job)


def _predicted(
    job: Job, cluster: EmulatedCluster | None, *, is_checked: bool
) -> LaunchPrediction | LaunchConstants | None:
    """Return the prediction to record for a job: its step time, or only the constants for it; None on GPUs.

    Raises:
        LaunchError: The job is checked, and does not fit in this machine's memory.
    """
    from shardscope.runtime.launcher.preflight import constants_at_launch, predicted_at_launch

    step = None
    if is_checked and not job.user_functions:  # only ranks may call user functions
        needed, step = predicted_at_launch(job, cluster)
        if needed is not None:
            needed.require_fits("launch it anyway with preflight=False")
    return step or constants_at_launch(job, cluster)


def _give_up(run: RunDir, error: BaseException) -> None:
    """Write to the status of a run that it will not start because the launch failed.

    Raises:
        LaunchError: The cause is that the directory of the run cannot be written.
    """
    details = {
        "message": f"the launch was interrupted ({type(error).__name__}: {error}); launch the job again"
    }
    started = process_started()
    with contextlib.suppress(OSError):  # the error to report is the one that ended the launch
        run.write_status(
            "failed", pid=os.getpid(), process_started=started, error=details, cause=Cause.NOT_STARTED
        )
    if isinstance(error, OSError) and run.refuses(error):
        raise unwritable(run.path, error) from None


def _require_cache_limit(job: Job) -> None:
    """Reject a ``$SHARDSCOPE_CACHE_LIMIT`` that is not a size, which ranks would detect only after their start."""
    if isinstance(job.data, Shards):
        limit_here()


def _placed(
    job: Job, cluster: EmulatedCluster | Literal["this machine"] | None, earlier: str | None
) -> tuple[Job, EmulatedCluster | None]:
    """Return the job as it runs on its cluster, and the cluster; None for this machine itself."""
    found = cluster
    if cluster is None and earlier is not None:
        found = cluster_of(Path(earlier))
    if found is None or found == "this machine":
        return job, None
    from shardscope.runtime.emulated.launching import on_cluster

    try:
        return on_cluster(job, found), found
    except (LaunchError, SpecError) as error:
        if cluster is not None:
            raise
        raise type(error)(
            f"{error} (the run to resume was on {found.name}; to resume it elsewhere, give another cluster, or "
            "cluster='this machine', which is --emulate none on the command line)"
        ) from None


def _hand_over(run: RunDir, request: dict[str, object]) -> None:
    """Send the run's request to the launch server. If that server is killed in the meantime, try another one."""
    for _ in range(_SERVERS):
        server = driver.server(run.path / "logs" / "server.log")
        try:
            pid = server.pid
        except BrokenPipeError:  # the warm process could not fork the server
            continue
        run.write_status(
            "starting", pid=pid, process_started=process_started(pid), detached=request["detach"]
        )
        if driver.request(server, json.dumps(request).encode()):
            return
    raise LaunchError(f"{_SERVERS} launch servers were killed right after they had started; free some memory")


def _source(resume: Run | str | Path, root: str | Path | None) -> str:
    return str(resume.path if isinstance(resume, Run) else find_resumable(resume, root))


def _imports(job: Job) -> list[str]:
    """Return the modules of Shardscope that this job needs; the server imports them once for all runs, before it
    forks.
    """
    methods: list[Method] = [job.strategy, job.optimizer, job.lr_schedule, job.compression]
    methods += [value for method in methods for _, value in method if isinstance(value, Method)]
    modules = filter(None, map(registry.module_on_ranks, map(type, methods)))
    goes_on = job.recovery is not None or job.elastic is not None
    also = [_CODECS] * job.compression.is_on + [_CHECKPOINTS] * goes_on
    return [*dict.fromkeys(modules), *also]


def _request(run: RunDir, job: Job, resume: str | None, *, detach: bool) -> dict[str, object]:
    return {
        "run": str(run.path),
        "resume": resume,
        "code": run.code,
        "detach": detach,
        "emulated": run.read_cluster() is not None,
        "imports": _imports(job),
        "cwd": str(Path.cwd()),
        "command": sys.orig_argv,
        "env": dict(os.environ),
        "sys_path": [*beyond_current_folder(sys.path), TOOLKIT],
        "modules": of_current_folder() if run.code is not None else None,
    }
