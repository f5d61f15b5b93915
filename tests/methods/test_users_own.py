"""Methods of the user's own, as a notebook cell defines them: registered, trained, saved, run again, searched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from shardscope.training.compression.codec import Codec

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
class Halved(PackedCompression):
    "Sends each number as a float of 16 bits, the first half of them only; the rest waits."

    name = "halved"

    share: float = 0.5
    feedback: bool = True

    def packet_bytes(self, num_elements):
        return 2 * int(self.share * num_elements)

    def codec(self):
        return HalvedCodec(self)


class HalvedCodec(Codec):
    def __init__(self, spec):
        self.spec = spec

    def num_bytes(self, num_elements):
        return self.spec.packet_bytes(num_elements)

    def encode(self, values, packet, seed):
        kept = packet.view(torch.float16)
        kept.copy_(values[: kept.numel()])

    def decode(self, packet, out, seed, *, add=False):
        kept = packet.view(torch.float16)
        if not add:
            out.zero_()
        out[: kept.numel()] += kept
"""


def run_compression_cell() -> type[ss.Compression]:
    cell: dict[str, Any] = {
        "ss": ss, "torch": torch, "Codec": Codec, "PackedCompression": ss.PackedCompression, "__name__": "__main__",
    }  # fmt: skip
    exec(COMPRESSION, cell)
    return cell["Halved"]


def run_optimizer_cell() -> type[ss.Optimizer]:
    cell: dict[str, Any] = {"ss": ss, "torch": torch, "__name__": "__main__"}
    exec(OPTIMIZER, cell)
    return cell["Lion"]


def run_cell(depth: float = 0.5) -> type[ss.LRSchedule]:
    """The class that a notebook cell defines, as if the cell had just been run."""
    cell: dict[str, Any] = {"ss": ss, "__name__": "__main__", "DEPTH": depth}
    exec(CELL.replace("DEPTH", str(depth)), cell)
    return cell["Sawtooth"]


@pytest.fixture(autouse=True)
def no_methods_left() -> Iterator[None]:
    yield
    registry._of_users.clear()


def job_of(**changes: Any) -> ss.Job:
    fields = {"model": "mlp", "data": "digits", "strategy": "ring", "batch": 24, "steps": 6}
    return ss.Job(**{**fields, **changes})


class TestSawtooth(LRScheduleConformance):
    method = run_cell()


class TestHalved(CompressionConformance):
    method = run_compression_cell()


class TestLion(OptimizerConformance):
    method = run_optimizer_cell()


def test_an_optimizer_that_builds_something_else_is_refused() -> None:
    class Builds(ss.Optimizer):
        name = "builds"

        def build(self, parameters: object) -> object:
            return parameters

    with pytest.raises(ss.RunFailed, match="optimizer='builds' built <shardscope.training.optim"):
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
            (Half, r"Half is no whole lr_schedule: it lacks factor_after_warmup\(step, steps\); define it"),
            (Nameless, "Nameless lacks a name; give it one"),
            (Spaced, "Spaced has name='my own'; give it one of small letters"),
            (NoDefault, "NoDefault.period has no default"),
            (Cosine, "Cosine.name='cosine' is taken by another lr_schedule"),
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
            except ss.UntrustedCode as error:
                print(error)
            print(ss.load_job({str(run.path)!r}, trust_code=True).lr_schedule.factor(2, 6))
        """
        settings, refusal, factor = printed_by(read)
        assert settings == "{'warmup_steps': 0, 'period': 3}"
        assert "carries code: lr_schedule='sawtooth'" in refusal
        assert float(factor) == pytest.approx(5 / 6)


def printed_by(code: str, **environment: str) -> list[str]:
    """The lines that a Python process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment}, cwd=TOP,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


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
        ss.SpecError, match=r"space: setting of sawtooth='perod' is not known; did you mean 'period'"
    ):
        ss.Space({"lr_schedule[sawtooth].perod": (2, 5)})


def test_it_is_checked_against_one_process() -> None:
    report = ss.check(job_of(lr_schedule=run_cell()(), world_size=2), steps=4)
    assert report.passed, report


class TestInstalledPackages:
    """A package's methods are found by their entry points, on the ranks too."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        """A folder of packages as pip leaves them: one whole method, and entry points that are broken."""
        (tmp_path / "saw.py").write_text("import shardscope as ss\n" + CELL.replace("DEPTH", "0.5"))
        about = tmp_path / "saw-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: saw\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[shardscope.methods]\nsawtooth = saw:Sawtooth\nmissing = saw:Nothing\nnumber = saw:int\ngone = nowhere:X\n"
        )
        return tmp_path

    def test_it_trains_by_name_and_needs_no_code_in_the_run(self, site: Path) -> None:
        code = """
            import json, shardscope as ss
            from shardscope.spec import registry
            print(registry.names(ss.LRSchedule)[-1], registry.origin(type(ss.LRSchedule("sawtooth"))))
            job = ss.Job(model="mlp", data="digits", batch=24, steps=4, lr_schedule="sawtooth")
            assert job.user_code == {} and "code" not in json.loads(job.to_json())["lr_schedule"]
            run = ss.launch(job).wait(90)
            print(run.state, run.error or "", [event["lr"] for event in run.events("step", rank=0)])
            for point, why in sorted(registry.broken_plugins().items()):
                print(point, why)
        """
        found, trained, *broken = printed_by(
            code, PYTHONPATH=f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )
        assert found == "sawtooth installed"
        assert trained.startswith("completed")
        assert json.loads(trained[trained.index("[") :]) == pytest.approx([1e-3, 0.875e-3, 0.75e-3, 0.625e-3])
        assert [line.split(" ")[1] for line in broken] == ["gone", "missing", "number"]
