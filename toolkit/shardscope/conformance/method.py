"""Conformance tests that apply to methods of every type: optimizers, compression methods, strategies and schedules."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from shardscope.runtime import Run, launch
from shardscope.spec import Job
from shardscope.spec.method import Method
from shardscope.spec.registry import names, register
from shardscope.spec.space import Space
from shardscope.training.parameters import FILE
from shardscope.tuning.apply import apply, check

_STEPS = 4
_TIMEOUT_S = 120


class MethodConformance:
    """Base class of conformance tests.

    A subclass for one type of method, such as optimizers, sets `kind`. A subclass that tests one method sets `method`.

    Class attributes:
        method: The class under test.
        kind: Base class of the methods that these tests apply to, such as `Optimizer`.
        job: Fields of the job that the tests run with the method.
    """

    method: ClassVar[type[Method]]
    kind: ClassVar[type[Method]] = Method
    job: ClassVar[dict[str, Any]] = {"model": "mlp", "data": "digits", "strategy": "ring", "batch": 24}

    def _job(self, **changes: Any) -> Job:
        return Job(**{**self.job, "steps": _STEPS, self.method.kind: register(self.method)(), **changes})

    def _train(self, **changes: Any) -> Run:
        """Run the job to completion, check its records, and return the run."""
        with tempfile.TemporaryDirectory(prefix="shardscope-conformance-") as root:
            run = launch(self._job(**changes), root=root).wait(_TIMEOUT_S)
            assert run.state == "completed", f"the run ended as {run.state}: {run.error or run.reason}"
            self._check_records(run)
        return run

    def _resumes(self, job: Job, *, tolerance: float = 0.0) -> None:
        """Check that the final weights of a resumed and an uninterrupted run differ by at most `tolerance`."""
        with tempfile.TemporaryDirectory(prefix="shardscope-conformance-") as root:
            whole = launch(job, root=root).wait(_TIMEOUT_S)
            first = launch(job.replace(until=2), root=root).wait(_TIMEOUT_S)
            second = launch(job, root=root, resume=first).wait(_TIMEOUT_S)
            for run in (whole, first, second):
                assert run.state == "completed", f"{job.strategy.label}: {run.error or run.reason}"
            with np.load(whole.path / FILE) as ours, np.load(second.path / FILE) as theirs:
                for name in ours.files:
                    if ours[name].tobytes() == theirs[name].tobytes():
                        continue
                    apart = float(np.abs(ours[name] - theirs[name]).max(initial=0.0))
                    assert apart <= tolerance, (
                        f"{job.strategy.label}: parameter {name} of the resumed run differs by {apart:.2g}, "
                        f"more than {tolerance:g}"
                    )

    def _check_records(self, run: Run) -> None:
        """Check the records of a finished run; does nothing unless a subclass overrides it."""

    def test_it_is_known_by_its_name(self) -> None:
        """The registry finds the method by its name."""
        register(self.method)
        name = self.method.name
        assert name in names(self.kind), (
            f"{name!r} is not registered; known are {', '.join(names(self.kind))}"
        )
        found = type(self.kind.by_name(name))
        assert found is self.method, (
            f"by_name({name!r}) creates a {found.__name__}, not a {self.method.__name__}"
        )

    def test_it_survives_json(self) -> None:
        """A job that uses the method survives a round trip through JSON."""
        job = self._job()
        assert Job.from_json(job.to_json()) == job

    def test_it_can_be_sent_to_ranks(self) -> None:
        """The method's class can be pickled, and the unpickled class creates an equal method."""
        method = register(self.method)()
        code = cloudpickle.loads(cloudpickle.dumps(self.method))
        assert code(**method.settings).settings == method.settings

    def test_it_is_an_axis_of_a_study(self) -> None:
        """A search space can offer the method as one of several choices, and a trial can apply it to a job."""
        others = [name for name in names(self.kind) if name != self.method.name][:1]
        job, axis = self._job(), self.method.kind
        space = Space(parameters={axis: [self.method.name, *others]})
        check(job, space)
        assert type(getattr(apply(job, {axis: self.method.name}), axis)) is self.method

    def test_it_trains_on_2_ranks(self) -> None:
        """A short job that uses the method completes on 2 real ranks."""
        self._train(world_size=2)

    def test_it_trains_on_3_ranks(self) -> None:
        """A short job that uses the method completes on 3 real ranks."""
        self._train(world_size=3)

    def test_it_trains_on_4_ranks(self) -> None:
        """A short job that uses the method completes on 4 real ranks."""
        self._train(world_size=4)
