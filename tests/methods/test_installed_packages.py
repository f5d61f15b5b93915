"""Methods of installed packages: found by their entry points, by name, in processes that import no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCES = Path(__file__).with_name("packages")
TIDEWATER = {
    "compression": ("first-half", "tidewater.compression:FirstHalf"),
    "optimizer": ("lion", "tidewater:Lion"),  # which is defined elsewhere, as is the strategy
    "lr_schedule": ("sawtooth", "tidewater.schedules:Sawtooth"),
    "schedule": ("patient", "tidewater.schedules:Patient"),
    "strategy": ("gathered", "tidewater:Gathered"),
}
LEAKY = {
    "compression": ("unpacked", "leaky:Unpacked", "Unpacked is not a complete compression: it lacks codec"),
    "optimizer": ("stepless", "leaky:Stepless", "Stepless is not a complete optimizer: it lacks build(parameters)"),
    "lr_schedule": ("flat", "leaky:Flat", "Flat is not a complete lr_schedule: it lacks factor_after_warmup("),
    "schedule": ("orderless", "leaky:Orderless", "Orderless is not a complete schedule: it lacks order(rank, ranks, "),
    "strategy": ("unbuilt", "leaky:Unbuilt", "Unbuilt is not a complete strategy: it lacks build(job, context)"),
}  # fmt: skip
JOBS = """
    import json, sys
    from pathlib import Path
    import shardscope as ss
    from shardscope.spec import registry

    def job_of(**changes):
        return ss.Job(**{"model": "mlp", "data": "digits", "batch": 24, "steps": 4, **changes})

    def jobs(world_size):
        "All five methods by their names."
        rest = {"optimizer": "lion", "lr_schedule": "sawtooth", "world_size": world_size}
        yield job_of(strategy="gathered", **rest)
        yield job_of(strategy="ring", compression="first-half", **rest)
        yield job_of(strategy=ss.Pipeline(schedule="patient", split="even"), **rest)
"""
"""What the programs begin with. None imports the package."""


def install(site: Path, package: str, points: dict[str, str]) -> None:
    """A package in a folder as pip leaves it."""
    source = SOURCES / package
    if source.is_dir():
        shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source.with_suffix(".py"), site)
    about = site / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[shardscope.methods]", *lines, ""]))


def printed_by(code: str, *sites: Path) -> list[str]:
    """The lines that a Python process of its own prints, with these folders of packages."""
    path = [*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(JOBS) + textwrap.dedent(code)], capture_output=True, text=True,
        timeout=280, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package with one method of each kind is installed."""
    site = tmp_path_factory.mktemp("site")
    install(site, "tidewater", dict(TIDEWATER.values()))
    return site


@pytest.fixture(scope="module")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a package is installed whose methods lack a member each, and whose entry points lead nowhere."""
    site = tmp_path_factory.mktemp("broken-site")
    points = {name: place for name, place, _ in LEAKY.values()}
    others = {"missing": "leaky:Nothing", "number": "leaky:int", "gone": "nowhere:X", "whole": "leaky:Whole"}
    install(site, "leaky", {**points, **others})
    return site


def test_they_are_found_by_their_names_without_torch(site: Path) -> None:
    code = """
        kinds = (ss.Compression, ss.Optimizer, ss.LRSchedule, ss.PipelineSchedule, ss.Strategy)
        for kind in kinds:
            name = registry.names(kind)[-1]
            print(kind.kind, name, registry.origin(type(kind(name))), registry.package_of(type(kind(name))))
        for job in jobs(2):
            assert job.user_code == {}
            text = job.to_json()
            assert '"code"' not in text and '"package": "tidewater"' in text
            assert ss.Job.from_json(text) == job
        assert "torch" not in sys.modules
        import tidewater
        assert job_of(strategy=tidewater.Gathered) == job_of(strategy="gathered")
        assert ss.register(tidewater.Lion) is tidewater.Lion
        print(registry.broken_plugins())
    """
    *found, broken = printed_by(code, site)
    assert found == [f"{kind} {name} installed tidewater" for kind, (name, _) in TIDEWATER.items()]
    assert broken == "{}"


@pytest.mark.slow
def test_a_job_that_imports_its_methods_needs_no_code_in_the_run(site: Path) -> None:
    code = """
        import tidewater
        run = ss.launch(job_of(strategy=tidewater.Gathered(scale=2.0), world_size=2)).wait(60)
        print(run.state, run.error or "", (run.path / "user_code.pkl").exists(), run.job.strategy.scale)
    """
    assert printed_by(code, site) == ["completed  False 2.0"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_jobs_that_were_read_back_train(site: Path, world_size: int) -> None:
    code = f"""
        for job in jobs({world_size}):
            run = ss.launch(ss.Job.from_json(job.to_json())).wait(90)
            assert run.state == "completed", run.error
            rates = [event["lr"] for event in run.events("step", rank=0)]
            assert rates == [job.optimizer.lr * job.lr_schedule.factor(step, 4) for step in range(1, 5)]
            sent = [row["sent_bytes"] for event in run.events("step") if event["step"] == 4
                    for row in event["traffic"].values()]
            found = ss.predict(run.job)
            print(run.job.strategy.label, found.sent_bytes.sum() == sum(sent) > 0, found.time.value > 0, found.fits)
    """
    said = printed_by(code, site)
    assert said == [f"{label} True True True" for label in ("gathered", "ring", "pipeline:patient")]


@pytest.mark.slow
def test_the_labs_list_them(site: Path) -> None:
    code = """
        from shardscope_widgets.job_form.choices import JobChoices, known_names
        from shardscope_widgets.job_form.families import (
            compressor_families, settings_of_method, strategy_families,
        )
        print(dict(strategy_families())["Your own"], "first-half" in dict(compressor_families())["Your own"])
        print([name in known_names(field) for field, name in
               (("optimizer", "lion"), ("lr_schedule", "sawtooth"), ("compression", "first-half"))])
        setting = next(each for each in settings_of_method(ss.Strategy, "pipeline") if each.field == "schedule")
        print(("patient", "patient") in setting.values)
        choices = JobChoices(strategy="pipeline:patient", optimizer="lion", lr_schedule="sawtooth", model="mlp")
        choices.lr_schedule_options = {"period": 3}
        job = choices.job()
        print(job.strategy.label, job.optimizer.name, job.lr_schedule.period)
        from shardscope_widgets.pipeline_explorer._comparison import comparison_info
        rows = comparison_info(4, 8, virtual_stages=1, t_f=1.0, t_input=1.0, t_weight=1.0)
        print([(row.held, row.problem) for row in rows if row.name == "patient"])
    """
    assert printed_by(code, site) == [
        "['gathered'] True",
        "[True, True, True]",
        "True",
        "pipeline:patient lion 3",
        "[(5.0, '')]",
    ]


@pytest.mark.slow
def test_a_study_searches_over_them(site: Path, tmp_path: Path) -> None:
    code = f"""
        from shardscope.spec.space import Space
        from shardscope.tuning.apply import apply, check
        methods = {{"compression": ["none", "first-half"], "compression[first-half].share": (0.1, 0.5)}}
        for axes in (methods, {{"strategy": ["ring", "gathered", "pipeline:patient"]}}):
            check(job_of(), Space(axes))
        print(apply(job_of(), {{"strategy": "pipeline:patient"}}).strategy.label)
        space = {{
            "strategy": ["ring", "gathered"], "optimizer": ["adamw", "lion"], "lr_schedule": ["constant", "sawtooth"],
            "lr_schedule[sawtooth].period": (2, 5),
        }}
        ss.tune(job_of(), space, trials=1, baselines=False, progress=False, root={str(tmp_path)!r}, name="mine")
        study = ss.tune(name="mine", trials=2, progress=False, root={str(tmp_path)!r})
        print([trial.state.name for trial in study.trials])
    """
    assert printed_by(code, site) == ["pipeline:patient", "['COMPLETE', 'COMPLETE']"]


@pytest.mark.slow
def test_runs_are_read_after_the_package_is_removed(site: Path, tmp_path: Path) -> None:
    trained = """
        for job in jobs(2):
            print(ss.launch(job).wait(90).path)
    """
    paths = printed_by(trained, site)
    code = f"""
        for path in {paths!r}:
            run = ss.Run.attach(path)
            job = ss.load_job(path)
            assert job == run.job and job.to_json() == (Path(path) / "job.json").read_text()
            assert job.replace(steps=9).lr_schedule.settings == {{"warmup_steps": 0, "period": 4}}
            print(run.state, job.strategy.label, job.user_code)
            tune = lambda job: ss.tune(job, {{"optimizer.lr": (1e-3, 1e-2)}}, trials=1, root={str(tmp_path)!r})
            for call in (ss.launch, ss.check, tune):
                try:
                    call(job)
                except ss.SpecError as error:
                    print("   ", error)
        print(len(ss.runs({str(Path(paths[0]).parent)!r})), ss.runs().skipped)
        try:
            job_of(strategy="gathered")
        except ss.SpecError as error:
            print(error)
    """
    lines = printed_by(code)
    assert [line for line in lines if line.startswith("completed")] == [
        f"completed {label} {{}}" for label in ("gathered", "ring", "pipeline:patient")
    ]
    said = [line.strip() for line in lines if line.startswith("   ")]
    assert len(said) == 9
    for line in said:
        assert "of the package 'tidewater', which is not installed here; install it" in line, line
    assert said[0].startswith("strategy='gathered' is a method of")
    assert lines[-2] == "3 ()"
    assert lines[-1].startswith("strategy='gathered' is not known; ")


@pytest.mark.slow
def test_a_broken_one_is_named_and_the_others_work(site: Path, broken_site: Path) -> None:
    code = """
        from shardscope.runtime.tools.doctor import _methods
        kinds = {kind.kind: kind for kind in
                 (ss.Compression, ss.Optimizer, ss.LRSchedule, ss.PipelineSchedule, ss.Strategy)}
        for kind, name in json.loads(POINTS).items():
            try:
                kinds[kind](name)
            except ss.SpecError as error:
                print(error)
        try:
            job_of(optimizer="gone")
        except ss.SpecError as error:
            print(error)
        print(*sorted(registry.broken_plugins()), sep=", ")
        print(len([*_methods()]), ss.LRSchedule("whole"), ss.Strategy("gathered"))
        run = ss.launch(job_of(strategy="gathered", lr_schedule="whole", world_size=2)).wait(90)
        print(run.state, run.error or "")
    """
    points = json.dumps({kind: name for kind, (name, *_) in LEAKY.items()})
    *said, gone, broken, others, trained = printed_by(
        f"POINTS = {points!r}\n{textwrap.dedent(code)}", site, broken_site
    )
    assert len(said) == len(LEAKY)
    for line, (kind, (name, _, why)) in zip(said, LEAKY.items(), strict=True):
        assert line.startswith(f"{kind}={name!r} of the package 'leaky' cannot be used: {why}"), line
    assert gone == "optimizer='gone' of the package 'leaky' cannot be used: No module named 'nowhere'"
    names = sorted([*(name for name, *_ in LEAKY.values()), "gone", "missing", "number"])
    assert broken == ", ".join(f"leaky: {name}" for name in names)
    assert others.startswith("8 Whole")
    assert trained == "completed "


@pytest.mark.weekly
@pytest.mark.parametrize("kind", TIDEWATER)
def test_each_passes_the_conformance_class_of_its_kind(site: Path, kind: str) -> None:
    place = TIDEWATER[kind][1].replace(":", " import ")
    code = f"""
        from {place} as Method
        import shardscope.conformance
        shardscope.conformance.check_method(Method)
        print("passed")
    """
    assert printed_by(code, site) == ["passed"]
