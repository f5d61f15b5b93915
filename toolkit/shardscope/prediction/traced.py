"""Trace of one training step of a job's model, recorded by torch from shapes only, as input to predictions.

    python -m shardscope.prediction.traced        reads jobs as JSON, one a line, and prints each line's hash and trace

A notebook's kernel and a study's driver do not need torch (200 MB, seconds to import), so a job without user code is
traced in a separate process. If torch is already loaded, or the job has user functions, it is traced in this
process, which takes a tenth of the time. Several jobs can share the other process, which loads torch once; see
`tracing_together`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from time import monotonic
from typing import Any

from shardscope.disk_cache import cache_dir, cached, source_state
from shardscope.errors import DataError, SpecError, StudyError
from shardscope.machine import cpu_model
from shardscope.spec import Job
from shardscope.spec._base import Spec
from shardscope.spec.data import DATA
from shardscope.spec.model.table import LayerTable
from shardscope.spec.shards import Shards

Elsewhere = Callable[[str], str]
_NUM_SAMPLES = 2
"""Number of samples to trace if memory is proportional to the number of samples."""
_WITHIN_S = 120.0
_MOST_KNOWN = 192
_KNOWN: dict[tuple[Any, ...], Traced] = {}


class Traced(Spec):
    """The layer table of what a rank computes, which includes one traced training step, and the size of one sample."""

    table: LayerTable
    """Layers of the model, or of a rank's part of it if the model is divided over a tensor or expert group."""
    whole: LayerTable | None = None
    """Layers of the undivided model; None if `table` has them."""
    sample_bytes: float
    """Bytes of the inputs and targets of one sample."""
    uncomputable: str = ""
    """Operations that torch cannot compute on this processor in the job's precision; empty if there are none, and for
    jobs on GPUs."""

    @property
    def model(self) -> LayerTable:
        """Layers of the undivided model."""
        return self.whole or self.table


def traced(job: Job, elsewhere: Elsewhere | None = None, *, builds: bool = True) -> Traced:
    """Return the trace of one training step of a job's model, with the job's data and precision.

    A model that is divided over a tensor or expert group is traced as a rank holds it, with the messages that the rank
    sends to its group. The undivided model is then traced as well.

    Traces of jobs without user code are cached, in this process and on disk. With user code, the cache of this process
    is used if `builds` is false.

    Args:
        job: The job whose model is traced. With ``device="cuda"``, its operations are those of a GPU.
        elsewhere: Function that traces a job in another process, which has torch: it takes the job as JSON and returns
            the trace as JSON. None starts a new process.
        builds: Whether to build the model with real values if its code does not run on the meta device.

    Example:
        >>> traced(Job(model="mlp", data="digits")).sample_bytes
        264.0

    Raises:
        SpecError: The model or the loss cannot be traced, or the job was loaded without one of its functions.
        DataError: The data cannot be read.
        StudyError: The tracing process failed.
    """
    codes = [*job.user_functions.values()]
    is_cast = job.precision not in ("fp32", "fp64")
    on_gpu = job.device == "cuda"
    grows = not codes and not is_cast and not on_gpu
    samples = _NUM_SAMPLES if grows else job.batch.per_rank(job.num_data_ranks) // job.num_micro_batches
    data, stamp = _file(job.data)
    strategy, ranks = job.strategy.of_replica(job.world_size)
    samples *= strategy.num_data_ranks(ranks)
    fields = {
        "model": job.model,
        "data": data,
        "loss": job.loss,
        "strategy": strategy,
        "world_size": ranks,
        "batch": samples,
        "precision": job.precision,
        "recompute": job.recompute,
        "device": "cuda" if on_gpu else "auto",
    }
    key = (*fields.values(), stamp, *(code.function for code in codes))
    found = _KNOWN.get(key)
    if found is None or (codes and builds):
        asked = Job(**fields)
        found = _traced_here(asked, builds=builds) if codes else _traced_once(asked, stamp, elsewhere)
        while len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[key] = found
    return found


def _file(data: object) -> tuple[Any, object]:
    """Return the data with its path made absolute, and a stamp that changes whenever the file is written."""
    if isinstance(data, Shards):
        path, stamp = _file(data.path)
        # An example must not be read slowly, nor end up in the cache of the runs, nor need a cache of their size.
        return data.replace(path=path, slow=None, cache=None, cache_folder=None, window=1), stamp
    if not isinstance(data, str) or data in DATA:
        return data, None
    path = Path(data).absolute()
    try:
        status = path.stat()
    except OSError:
        return data, None
    return str(path), (status.st_mtime_ns, status.st_size)


def _traced_once(asked: Job, stamp: object, elsewhere: Elsewhere | None) -> Traced:
    """Return the trace of a job without user code from the cache on disk, or trace the job and store the result."""

    def make() -> Traced:
        if "torch" in sys.modules:
            return _traced_here(asked)
        return Traced.from_json((elsewhere or _traced_elsewhere)(asked.to_json()))

    key = asked.to_json(), stamp
    try:
        cache_dir()
    except (DataError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        warnings.warn(f"{error}; until then, traces of models are not cached on disk", stacklevel=2)
        return make()
    return cached(
        f"trace-{sha256(repr((key, _versions())).encode()).hexdigest()[:32]}.json",
        make,
        read=lambda path: Traced.from_json(path.read_text()),
        write=lambda file, found: file.write(found.to_json().encode()),
        keep=_MOST_KNOWN,
    )


@cache
def _versions() -> tuple[object, ...]:
    """Return everything besides the job that a trace depends on: torch, the processor, Shardscope, and the state of its
    source.
    """
    return (
        version("torch"),
        cpu_model(),
        os.environ.get("ONEDNN_MAX_CPU_ISA"),
        *source_state("spec", "storage", "training", "prediction"),
    )


def _traced_here(asked: Job, *, builds: bool = True) -> Traced:
    from shardscope.prediction._torch_trace import trace

    return trace(asked, builds=builds)


@contextmanager
def tracing_together() -> Iterator[None]:
    """Context manager in which jobs that are traced in another process are all traced in the same one."""
    shared = _Tracer()
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)
        shared.close()


class _Tracer:
    """Another process, which loads torch and traces jobs until it is closed; started with the first job."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, asked: str) -> str:
        child = self._child = self._child or self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        began, late = monotonic(), Timer(_WITHIN_S, child.kill)
        late.start()
        line = asked.replace("\n", " ") + "\n"
        answers = f"{_name_of(line)} "
        try:
            child.stdin.write(line)
            child.stdin.flush()
            # other code of the process may print lines of its own
            found = next((each for each in iter(child.stdout.readline, "") if each.startswith(answers)), "")
        except BrokenPipeError:  # it ended with an error
            found = ""
        finally:
            late.cancel()
        if found:
            return found.removeprefix(answers)
        told = self._ended()
        if monotonic() - began >= _WITHIN_S:
            raise StudyError(_failed(asked, f"it took more than {_WITHIN_S:.0f} s"))
        raise _error_of(asked, told, child.returncode)

    def close(self) -> None:
        """End the process, also in the middle of a trace."""
        if self._child is not None:
            self._child.kill()
            self._ended()

    def _ended(self) -> str:
        """Wait for the end of the process, and return what it has written to its standard error."""
        assert self._child is not None
        self._child.communicate()
        self._child = None
        self._told.seek(0)
        return self._told.read().decode(errors="replace")

    def _started(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(
            [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        command = [sys.executable, "-P", "-m", "shardscope.prediction.traced"]
        self._told = TemporaryFile()  # noqa: SIM115 - until the process ends; a pipe that nobody reads fills up
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


_shared: ContextVar[_Tracer | None] = ContextVar("shared_tracer", default=None)


def _name_of(asked: str) -> str:
    """Return the name of a line with a job, which begins the line of its trace."""
    return sha256(asked.encode()).hexdigest()


def _traced_elsewhere(asked: str) -> str:
    shared = _shared.get()
    if shared is not None:
        return shared(asked)
    with tracing_together():
        return _traced_elsewhere(asked)


def _error_of(asked: str, told: str, status: int) -> SpecError | DataError | StudyError:
    """Return the error with which the tracing process ended, given its standard error."""
    lines = told.strip().splitlines() or [f"status {status}"]
    for kind in (SpecError, DataError):  # the user's own mistake, not one of the process
        if lines[-1].startswith(said := f"{kind.__module__}.{kind.__name__}: "):
            return kind(lines[-1].removeprefix(said))
    return StudyError(_failed(asked, lines[-1]))


def _failed(asked: str, reason: str) -> str:
    return (
        f"the process that traces a step of model={Job.from_json(asked).model!r} failed: {reason}; "
        "run shardscope doctor to check whether torch works here"
    )


if __name__ == "__main__":
    from shardscope.prediction._torch_trace import trace

    for line in sys.stdin:
        print(f"\n{_name_of(line)}", trace(Job.from_json(line)).model_dump_json(), flush=True)
