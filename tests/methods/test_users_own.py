"""Methods of the user's own, as a notebook cell defines them: registered, trained, saved, run again, searched."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import shardscope as ss
from shardscope.conformance import (
    CompressionConformance,
    LRScheduleConformance,
    OptimizerConformance,
    check_method,
)
from shardscope.spec import registry
from shardscope.spec.space import Space
from shardscope.tuning.apply import apply

TOP = Path(__file__).parents[2]
CELL = """
class Sawtooth(ss.LRSchedule):
    "Falls by half within a period, and starts again."

    name = "sawtooth"

    period: int = 4

    def factor_after_warmup(self, step, steps):
        return 1 - DEPTH * ((step - 1) % self.period) / self.period
"""

OPTIMIZER = """
class Lion(ss.Optimizer):
    "Moves by the sign of its momentum (Chen et al. 2023, arXiv:2302.06675)."

    name = "lion"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def states(self):
        return ss.OptimizerStates(tensors=1)

    def build(self, parameters):
        return LionStep(parameters.groups(), {"lr": self.lr, "betas": self.betas})


class LionStep(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            blend, decay = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    momentum = state.setdefault("momentum", torch.zeros_like(weight))
                    weight.sub_(momentum.lerp(weight.grad, 1 - blend).sign(), alpha=group["lr"])
                    momentum.lerp_(weight.grad, 1 - decay)
"""


COMPRESSION = """
class FirstHalf(ss.PackedCompression):
    "Sends the first half of the numbers as floats of 16 bits; the rest waits."

    name = "first-half"

    share: float = 0.5
    feedback: bool = True

    def packet_bytes(self, num_elements):
        return 2 * int(self.share * num_elements)

    def codec(self):
        def unpack(packet, count):
            out = torch.zeros(count)
            out[: packet.numel() // 2] = packet.view(torch.float16)
            return out

        return ss.SimpleCodec(self.packet_bytes, lambda values: values[: int(self.share * len(values))].half(), unpack)
"""


def run_compression_cell() -> type[ss.Compression]:
    cell: dict[str, Any] = {"ss": ss, "torch": torch, "__name__": "__main__"}
    exec(COMPRESSION, cell)
    return cell["FirstHalf"]


def run_optimizer_cell() -> type[ss.Optimizer]:
    cell: dict[str, Any] = {"ss": ss, "torch": torch, "__name__": "__main__"}
    exec(OPTIMIZER, cell)
    return cell["Lion"]


def run_cell(depth: float = 0.5) -> type[ss.LRSchedule]:
    """The class that a notebook cell defines, as if the cell had just been run."""
    cell: dict[str, Any] = {"ss": ss, "__name__": "__main__", "DEPTH": depth}
    exec(CELL.replace("DEPTH", str(depth)), cell)
    return cell["Sawtooth"]


def job_of(**changes: Any) -> ss.Job:
    fields = {"model": "mlp", "data": "digits", "strategy": "ring", "batch": 24, "steps": 6}
    return ss.Job(**{**fields, **changes})


class TestSawtooth(LRScheduleConformance):
    method = run_cell()


class TestFirstHalf(CompressionConformance):
    method = run_compression_cell()


class TestLion(OptimizerConformance):
    method = run_optimizer_cell()


def test_an_optimizer_that_builds_something_else_is_refused() -> None:
    class Builds(ss.Optimizer):
        name = "builds"

        def build(self, parameters: object) -> object:
            return parameters

    with pytest.raises(ss.RunFailed, match="its build method returned <shardscope.training.optim"):
        ss.launch(job_of(optimizer=Builds(), world_size=2)).wait(60)


def test_check_method_runs_the_same_tests_and_names_the_one_that_fails() -> None:
    class Negative(ss.LRSchedule):
        name = "negative"

        def factor_after_warmup(self, step: int, steps: int) -> float:
            return -1.0

    with pytest.raises(
        AssertionError, match="Negative fails test_factors_are_finite_and_not_negative: the factor"
    ):
        check_method(Negative)


class TestRegistration:
    def test_a_class_is_known_once_it_is_registered_or_used(self) -> None:
        assert "sawtooth" not in registry.names(ss.LRSchedule)
        with pytest.raises(ss.SpecError, match="lr_schedule='sawtooth' is not known"):
            job_of(lr_schedule="sawtooth")
        sawtooth = run_cell()
        assert job_of(lr_schedule=sawtooth(period=3)).lr_schedule.settings["period"] == 3
        assert job_of(lr_schedule="sawtooth").lr_schedule == sawtooth()
        assert job_of(lr_schedule=sawtooth) == job_of(lr_schedule="sawtooth")
        assert ss.LRSchedule("sawtooth", period=5) == sawtooth(period=5)

    def test_a_cell_that_is_run_again_replaces_the_class(self) -> None:
        first = ss.register(run_cell(0.5))
        old_job = job_of(lr_schedule="sawtooth")
        second = ss.register(run_cell(0.8))
        assert job_of(lr_schedule="sawtooth").lr_schedule.factor(2, 6) == pytest.approx(1 - 0.8 / 4)
        assert old_job.lr_schedule.factor(2, 6) == pytest.approx(1 - 0.5 / 4)
        old_job.replace(steps=9)  # hands the earlier class to a job once more
        assert registry.find(ss.LRSchedule, "sawtooth") is second
        assert first is not second

    def test_what_is_missing_is_named(self) -> None:
        class Half(ss.LRSchedule):
            name = "half"

        class Nameless(ss.LRSchedule):
            def factor_after_warmup(self, step: int, steps: int) -> float:
                return 1.0

        class Spaced(Nameless):
            name = "my own"

        class NoDefault(Nameless):
            name = "no-default"
            period: int

        class Cosine(Nameless):
            name = "cosine"

        for cls, said in (
            (
                Half,
                r"Half is not a complete lr_schedule: it lacks factor_after_warmup\(step, steps\); define it",
            ),
            (Nameless, "Nameless lacks a name; give it a name"),
            (Spaced, "Spaced has name='my own'; give it a name of lower-case letters"),
            (NoDefault, "NoDefault.period has no default"),
            (Cosine, "Cosine.name='cosine' is already the name of another lr_schedule"),
            (int, "int is not a method; derive it"),
        ):
            with pytest.raises(ss.SpecError, match=said):
                ss.register(cls)  # type: ignore[type-var]
        with pytest.raises(ss.SpecError, match="NoDefault.period has no default"):
            job_of(lr_schedule=NoDefault(period=3))


class TestSavedJobs:
    def test_json_holds_name_settings_and_a_digest_and_is_read_where_the_class_is_not(self) -> None:
        job = job_of(lr_schedule=run_cell()(period=3))
        text = job.to_json()
        saved = json.loads(text)["lr_schedule"]
        assert {**saved, "code": "?"} == {"name": "sawtooth", "warmup_steps": 0, "period": 3, "code": "?"}
        registry._of_users.clear()
        elsewhere = ss.Job.from_json(text)
        assert elsewhere.lr_schedule.settings == {"warmup_steps": 0, "period": 3}
        assert elsewhere.to_json() == text
        with pytest.raises(ss.SpecError, match="the code of 'sawtooth' is not part of this job.json"):
            elsewhere.lr_schedule.factor(1, 6)
        with pytest.raises(ss.SpecError, match="the code of 'sawtooth' is not part of this job.json"):
            ss.launch(elsewhere)

    def test_the_same_cell_run_again_finds_its_jobs_and_another_one_does_not(self) -> None:
        text = job_of(lr_schedule=run_cell()(period=3)).to_json()
        registry._of_users.clear()
        again = ss.register(run_cell())
        assert type(ss.Job.from_json(text).lr_schedule) is again
        ss.register(run_cell(0.8))
        other = ss.Job.from_json(text).lr_schedule
        assert other.user_code is not None
        assert not other.user_code.is_here

    def test_a_run_is_loaded_with_its_class(self) -> None:
        run = ss.launch(job_of(lr_schedule=run_cell()(period=3), world_size=2)).wait(60)
        assert run.state == "completed", run.error
        rates = [event["lr"] for event in run.events("step", rank=0)]
        assert rates == pytest.approx([1e-3, 1e-3 * 5 / 6, 1e-3 * 4 / 6] * 2)
        registry._of_users.clear()
        loaded = ss.load_job(run)  # this process wrote the code
        assert loaded.lr_schedule.factor(2, 6) == pytest.approx(5 / 6)
        assert ss.LRSchedule("sawtooth").settings["period"] == 4

    def test_another_process_reads_the_run_and_loads_its_class_on_the_users_word(self) -> None:
        run = ss.launch(job_of(lr_schedule=run_cell()(period=3), world_size=2)).wait(60)
        read = f"""
            import shardscope as ss
            job = ss.Run.attach({str(run.path)!r}).job
            print(job.lr_schedule.settings)
            try:
                ss.load_job({str(run.path)!r})
            except ss.errors.UntrustedCode as error:
                print(error)
            print(ss.load_job({str(run.path)!r}, trust_code=True).lr_schedule.factor(2, 6))
        """
        settings, refusal, factor = printed_by(read)
        assert settings == "{'warmup_steps': 0, 'period': 3}"
        assert "contains code: lr_schedule='sawtooth'" in refusal
        assert float(factor) == pytest.approx(5 / 6)


def printed_by(code: str, **environment: str) -> list[str]:
    """The lines that a Python process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment}, cwd=TOP,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_it_is_an_axis_of_a_study_with_its_settings(tmp_path: Path) -> None:
    ss.register(run_cell())
    space = {"lr_schedule": ["constant", "sawtooth"], "lr_schedule[sawtooth].period": (2, 5)}
    study = ss.tune(
        job_of(world_size=2), space, trials=4, storage=f"sqlite:///{tmp_path}/study.db", progress=False, root=tmp_path
    )  # fmt: skip
    chosen = [trial.params for trial in study.trials]
    assert any(params["lr_schedule"] == "sawtooth" for params in chosen)
    assert all(
        ("lr_schedule[sawtooth].period" in params) == (params["lr_schedule"] == "sawtooth")
        for params in chosen
    )
    with pytest.raises(
        ss.SpecError, match=r"space: sawtooth setting='perod' is not known; did you mean 'period'"
    ):
        Space({"lr_schedule[sawtooth].perod": (2, 5)})


def complete(study: Any) -> int:
    """How many trials have run; one that repeats another's settings does not."""
    return len([trial for trial in study.trials if trial.state.name == "COMPLETE"])


class TestStudiesOfOtherCode:
    @pytest.fixture
    def tuned(self, tmp_path: Path) -> Any:
        """What begins the study and goes on with it."""
        ss.register(run_cell(0.5))

        def tune(trials: int, **about: Any) -> Any:
            options = {"name": "mine", "baselines": False, "progress": False, "root": tmp_path}
            return ss.tune(trials=trials, **options, **about)

        return tune

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("changes", "space"),
        [
            ({}, {"lr_schedule": ["constant", "sawtooth", "cosine"]}),
            ({"lr_schedule": "sawtooth"}, {"optimizer.lr": (1e-3, 1e-2, "log")}),
        ],
        ids=["in the space", "in the job"],
    )
    def test_it_is_said_that_the_code_is_another(
        self, tuned: Any, changes: dict[str, Any], space: Any
    ) -> None:
        assert complete(tuned(1, job=job_of(**changes), space=space)) == 1
        ss.register(run_cell(0.8))
        with pytest.raises(
            ss.errors.StudyError,
            match="study 'mine' was created with other arguments: lr_schedule='sawtooth' had different code; resume",
        ):
            tuned(2, job=job_of(**changes), space=space)
        with pytest.raises(
            ss.errors.StudyError,
            match="'mine' was created with different code for lr_schedule='sawtooth'; restore that code",
        ):
            tuned(2)
        ss.register(run_cell(0.5))
        assert complete(tuned(2)) == 2
        assert complete(tuned(3, job=job_of(**changes), space=space)) == 3

    def test_where_the_class_is_not_defined_no_trial_is_begun(self, tuned: Any) -> None:
        tuned(1, job=job_of(lr_schedule="sawtooth"), space={"optimizer.lr": (1e-3, 1e-2, "log")})
        registry._of_users.clear()
        with pytest.raises(ss.SpecError, match="the code of 'sawtooth' is not part of this job.json"):
            tuned(2)


def test_it_is_checked_against_one_process() -> None:
    report = ss.check(job_of(lr_schedule=run_cell()(), world_size=2), steps=4)
    assert report.passed, report


class TestOddClasses:
    """What a cell may hold that is not a complete method is refused in a sentence, wherever it is handed in."""

    def test_settings_that_cannot_be(self) -> None:
        class Base(ss.LRSchedule):
            def factor_after_warmup(self, step: int, steps: int) -> float:
                return 1.0

        class Annotated(Base):
            name: str = "annotated"

        class Code(Base):
            name = "code"
            code: int = 3

        class Kind(Base):
            name = "kinded"
            kind = "lr_schedule"

        class Levels(Base):
            name = "levels"
            levels: list[int] = [1, 2]  # noqa: RUF012 - as a cell may have it

        class Picky(Base):
            name = "picky"

            def model_post_init(self, _context: object) -> None:
                raise ValueError("not today")

        for cls, said in (
            (Base, "Base lacks a name"),
            (Annotated, "Annotated.name cannot be a setting; write it without an annotation"),
            (Code, "Code.code cannot be a setting; rename it"),
            (Kind, "Kind sets its kind or folder"),
            (Levels, "is not hashable .*; use hashable settings, such as tuples"),
            (Picky, "not today"),
        ):
            with pytest.raises(ss.SpecError, match=said):
                job_of(lr_schedule=cls)
        for call in (
            lambda: ss.PackedCompression("int8"),
            lambda: job_of(compression=ss.PackedCompression),
            lambda: job_of(optimizer=ss.Optimizer),
            lambda: ss.check_method(5),  # type: ignore[arg-type]
        ):
            with pytest.raises((ss.SpecError, TypeError), match="it lacks|is not a method"):
                call()

    def test_a_key_of_json_is_never_taken_for_an_argument(self) -> None:
        for fields in ({"name": "adamw", "cls": 3}, {"name": "adamw", "self": 3}):
            with pytest.raises(ss.SpecError, match="adamw setting="):
                job_of(optimizer=fields)
        with pytest.raises(ss.SpecError, match="code digest that is not a string"):
            job_of(optimizer={"name": "mine", "code": 3})
        with pytest.raises(ss.SpecError, match="topk setting='code' is not known"):
            ss.Compression("topk", code="abc")

    def test_a_compressor_may_change_with_the_steps(self) -> None:
        class EveryOther(run_compression_cell()):  # type: ignore[misc]
            name = "every-other"

            def at_step(self, step: int) -> ss.Compression:
                return ss.Compression("none") if step % 2 == 0 else self

        assert job_of(compression=EveryOther(), steps=10).compression.at_step(2).name == "none"


class TestDigests:
    def test_it_covers_what_a_class_inherits_and_its_attributes(self) -> None:
        def made(rate: float, shared: float) -> type[ss.LRSchedule]:
            cell: dict[str, Any] = {"ss": ss, "__name__": "__main__", "ClassVar": ClassVar}
            exec(
                "class Base(ss.LRSchedule):\n"
                f"    def factor_after_warmup(self, step, steps):\n        return {shared} * self.RATE\n"
                f"class Mine(Base):\n    name = 'mine'\n    RATE: ClassVar[float] = {rate}\n",
                cell,
            )
            return cell["Mine"]

        digests = [
            made(*values).code_digest() for values in ((0.5, 1.0), (0.5, 1.0), (0.75, 1.0), (0.5, 0.9))
        ]
        assert digests[0] == digests[1]
        assert len(set(digests)) == 3

    def test_it_is_the_same_in_every_process(self) -> None:
        lines = [
            "class Mine(ss.LRSchedule):", "    name = 'mine'", "    def factor_after_warmup(self, step, steps):",
            "        return 1.0 if str(step) in {'a', 'b', 'c', 'd'} else 0.5",
        ]  # fmt: skip
        code = f"import shardscope as ss\nexec({chr(10).join(lines)!r})\nprint(Mine.code_digest())"
        assert len({printed_by(code, PYTHONHASHSEED=seed)[0] for seed in ("1", "2", "3")}) == 1

    def test_code_out_of_a_run_takes_the_place_of_none_that_is_defined_here(self) -> None:
        run = ss.launch(job_of(lr_schedule=run_cell(0.5)(period=3), world_size=2)).wait(60)
        current = ss.register(run_cell(0.8))
        loaded = ss.load_job(run)
        assert loaded.lr_schedule.factor(2, 6) == pytest.approx(1 - 0.5 / 3)
        loaded.replace(steps=7)
        assert registry.find(ss.LRSchedule, "sawtooth") is current
        assert type(job_of(lr_schedule="sawtooth").lr_schedule) is current

    def test_a_stand_in_is_changed_pickled_and_compared(self) -> None:
        text = job_of(lr_schedule=run_cell()(period=3)).to_json()
        registry._of_users.clear()
        job = ss.Job.from_json(text)
        assert job == ss.Job.from_json(text)
        changed = job.replace(lr_schedule=job.lr_schedule.replace(warmup_steps=2))
        assert json.loads(changed.to_json())["lr_schedule"] == {
            **json.loads(text)["lr_schedule"], "warmup_steps": 2
        }  # fmt: skip
        assert pickle.loads(pickle.dumps(job)) == job
        assert apply(job, {"batch": 32}).lr_schedule.settings["period"] == 3
