"""What other tools are given of a run is what the run itself says."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from conformance.damage import recorded_run
from conformance.runs import SHORT_TEXT, small_job
from shardscope import cli
from shardscope.methods.strategies.mesh import Mesh
from shardscope.runlog.chakra import write_nodes
from shardscope.runtime.export import traffic_frame
from shardscope.runtime.export.chakra import trace_of
from shardscope.runtime.export.trackers import figures_of, settings_of
from shardscope.simulator import Simulation


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    """Of so many steps, some have ended all their collectives themselves, on a busy machine as well."""
    job = small_job(
        strategy="all-reduce", world_size=2, steps=20, eval_every=4, record=ss.Record(spans_first=20)
    )
    return ss.launch(job, root=tmp_path_factory.mktemp("exported")).wait(100)


def read_trace(path: str) -> list[dict[str, Any]]:
    return json.loads(Path(path).read_text())["traceEvents"]


def test_a_chrome_trace_has_every_span_in_the_process_of_its_rank(run: ss.Run, tmp_path: Path) -> None:
    path = run.export(tmp_path / "deep" / "run.json", format="chrome-trace")
    events = read_trace(path)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and threads[e["pid"], e["tid"]] != "steps"]
    told = sorted(
        (e["pid"], e["args"]["step"], e["name"], e["ts"], e["args"].get("bytes", 0)) for e in slices
    )
    spans = run.timeline()
    assert told == sorted(
        (row.rank, row.step, row.title, round(row.start_s * 1e6, 3), row.bytes)
        for row in spans.rename(columns={"name": "title"}).itertuples()
    )
    ends = {(e["pid"], e["ts"], e["name"]): e["ts"] + e["dur"] for e in slices}
    for row in spans.rename(columns={"name": "title"}).itertuples():
        assert ends[row.rank, round(row.start_s * 1e6, 3), row.title] == pytest.approx(
            row.end_s * 1e6, abs=2e-3
        )
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 0] == [
        f"step {step}" for step in sorted(set(spans["step"]))
    ]


SLOW = ss.Link(bandwidth=1e4, latency=1e-3)
"""A link on which a step of these small jobs takes a minute, so that the noise of computing does not count."""


def as_traced(run: ss.Run, folder: Path) -> Simulation:
    """Export one step of a run, and simulate it on `SLOW` links."""
    pytest.importorskip("google.protobuf")
    path = run.export(folder / "deep" / "step", format="chakra")
    return ss.simulate.chakra([f"{path}.{rank}.et" for rank in range(run.job.world_size)], SLOW)


def test_a_chakra_trace_has_a_collective_whose_messages_are_unknown_as_a_whole(
    run: ss.Run, tmp_path: Path
) -> None:
    found = as_traced(run, tmp_path)
    sent = traffic_frame(run).query("event == 'step' and step == 4")["sent_bytes"].sum()
    assert found.collectives().set_index("collective")["bytes"]["all_reduce"] == sent
    assert {term.name for term in found.time.parts} >= {"forward", "backward", "optimizer", "all_reduce"}


def test_a_step_with_a_collective_of_the_step_before_is_not_exported(run: ss.Run, tmp_path: Path) -> None:
    """An all-reduce of DDP may end while its rank is already in the next step, on all ranks at once."""
    copy = tmp_path / "late"
    shutil.copytree(run.path, copy)
    for file in copy.glob("**/rank-*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        steps = {row["step"]: row["spans"] for row in rows if row["event"] == "step" and "spans" in row}
        late = next(span for spans in steps.values() for span in spans if span[1] == "all_reduce")
        steps[3].append(late)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = as_traced(ss.Run.attach(copy), tmp_path)
    assert found.collectives().set_index("collective")["bytes"]["all_reduce"] == 2 * gradient_bytes(run)


def gradient_bytes(run: ss.Run) -> int:
    return run.events("start")[0]["gradient_bytes"]


def test_a_collective_on_an_axis_of_a_mesh_is_one_of_the_ranks_of_its_group(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    job = ss.Job(model="gpt-nano", data=SHORT_TEXT, layout=ss.Layout(data=3, tensor=2), batch=12)
    sizes = {"tensor:all_reduce": 8_000_000, "data:all_gather": 6_000_000}
    spans = [
        ["communication", name, 2.0 * at, 2.0 * at + 1, size] for at, (name, size) in enumerate(sizes.items())
    ]
    traffic = {name: {"calls": 1} for name in sizes}
    rows = [
        {"event": "step", "rank": rank, "step": 1, "spans": spans, "traffic": traffic} for rank in range(6)
    ]
    nodes = trace_of(SimpleNamespace(job=job, id="hand-made", events=lambda: rows))
    told = [[(node.attributes["pg_name"], node.attributes["comm_size"]) for node in own] for own in nodes]
    assert told == [
        [
            (str([rank - rank % 2, rank - rank % 2 + 1]), 8_000_000),
            (str([rank % 2 + 2 * n for n in range(3)]), 2_000_000),
        ]
        for rank in range(6)
    ]
    for rank, own in enumerate(nodes):
        write_nodes(tmp_path / f"step.{rank}.et", own)
    found = ss.simulate.chakra([tmp_path / f"step.{rank}.et" for rank in range(6)], SLOW)
    sent = found.collectives().set_index("collective")["bytes"]
    assert sent.to_dict() == {"tensor:all_reduce": 6 * 8_000_000, "data:all_gather": 6 * 4_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-3", "pipeline", Mesh(tensor=2)], ids=lambda each: str(each)[:8])
def test_a_run_that_is_exported_and_read_back_simulates_like_its_job(strategy: Any, tmp_path: Path) -> None:
    ranks = 4 if isinstance(strategy, Mesh) else 2
    job = ss.Job(model="gpt-nano", data=SHORT_TEXT, strategy=strategy, world_size=ranks, batch=8, steps=4)
    run = ss.launch(job, root=tmp_path).wait(100)
    traced, asked = as_traced(run, tmp_path), ss.simulate(job.replace(link=SLOW))
    assert traced.collectives()["bytes"].sum() == asked.collectives()["bytes"].sum()
    assert traced.step_time_s == pytest.approx(asked.step_time_s, rel=0.03)


def test_a_chakra_trace_needs_spans(tmp_path: Path) -> None:
    job = small_job(strategy="ring", world_size=2, steps=2, record=ss.Record(spans_first=0))
    with pytest.raises(ss.SpecError, match="no finished step with spans"):
        ss.launch(job, root=tmp_path).wait(100).export(tmp_path / "step", format="chakra")


def test_slices_of_a_thread_never_overlap(run: ss.Run, tmp_path: Path) -> None:
    """Viewers drop or misplace slices of one thread that overlap without nesting."""
    threads = defaultdict(list)
    for event in read_trace(run.export(tmp_path / "run.json", format="chrome-trace")):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(end <= start + 2e-3 for (_, end), (start, _) in pairwise(slices))


def test_spans_that_overlap_in_a_lane_get_threads_of_their_own() -> None:
    import pandas as pd

    from shardscope.runlog.chrome_trace import trace_events

    rows = [
        (0, 1, "comm", "a", 0.0, 2.0, 8),
        (0, 1, "comm", "b", 1.0, 3.0, 8),
        (0, 1, "comm", "c", 2.0, 4.0, 0),
    ]
    spans = pd.DataFrame(rows, columns=["rank", "step", "lane", "name", "start_s", "end_s", "bytes"])
    events = trace_events(spans)
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {0: "steps", 1: "comm", 2: "comm 2"}
    found = [(named[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [
        ("steps", "step 1", 0.0, 4e6), ("comm", "a", 0.0, 2e6), ("comm", "c", 2e6, 2e6), ("comm 2", "b", 1e6, 2e6),
    ]  # fmt: skip


def test_a_step_ends_before_the_next_one_begins() -> None:
    import pandas as pd

    from shardscope.runlog.chrome_trace import trace_events

    rows = [(0, 1, "comm", "a", 0.0, 2.5, 8), (0, 2, "compute", "b", 2.0, 3.0, 0)]
    spans = pd.DataFrame(rows, columns=["rank", "step", "lane", "name", "start_s", "end_s", "bytes"])
    steps = [e for e in trace_events(spans) if e["ph"] == "X" and e["name"].startswith("step")]
    assert [(e["ts"], e["dur"]) for e in steps] == [(0.0, 2e6), (2e6, 1e6)]


def test_a_chrome_trace_may_be_compressed_and_is_refused_without_spans(run: ss.Run, tmp_path: Path) -> None:
    plain, packed = (run.export(tmp_path / f"run.json{end}", format="chrome-trace") for end in ("", ".gz"))
    assert gzip.decompress(Path(packed).read_bytes()) == Path(plain).read_bytes()
    empty = ss.launch(small_job(steps=1, record=ss.Record(spans_first=0))).wait(100)
    with pytest.raises(
        ss.SpecError, match=r"has recorded no spans; launch it with Record\(spans_first=100\)"
    ):
        empty.export(tmp_path / "none.json", format="chrome-trace")


def test_traffic_is_a_row_for_each_rank_event_and_collective(run: ss.Run) -> None:
    frame = traffic_frame(run)
    assert set(frame["event"]) >= {"step", "eval", "test"}
    of_steps = frame[frame["event"] == "step"].groupby("step")["sent_bytes"].sum()
    assert of_steps.tolist() == run.metrics()["sent_bytes"].tolist()


def test_figures_are_those_of_the_run_and_of_its_evaluations(run: ss.Run) -> None:
    figures = figures_of(run)
    metrics, summary = run.metrics(), run.summary()
    assert [each.step for each in figures] == [*range(1, 21)]
    assert [each.numbers["loss"] for each in figures] == metrics["loss"].tolist()
    assert [each.step for each in figures if "validation_loss" in each.numbers] == [4, 8, 12, 16, 20]
    assert [each.step for each in figures if "test_loss" in each.numbers] == [20]
    last = figures[-1].numbers
    assert (last["validation_loss"], last["validation_accuracy"]) == (
        summary.validation_loss,
        summary.validation_accuracy,
    )
    assert (last["test_loss"], last["test_accuracy"]) == (summary.test_loss, summary.test_accuracy)
    assert "tokens_per_s" not in last  # digits have none
    settings = settings_of(run)
    assert (settings["steps"], settings["optimizer.lr"]) == (20, run.job.optimizer.lr)


def test_evaluations_of_earlier_versions_are_not_called_validation(runs_root: Path) -> None:
    older = ss.Run.attach(recorded_run(runs_root))
    assert older.events("eval")
    assert not [each for each in figures_of(older) if "validation_loss" in each.numbers]
    assert older.summary().validation_loss is None
    assert (older.summary().test_loss, older.summary().test_accuracy) == (1.0, 0.5)


MODULES = {"parquet": "pyarrow", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@pytest.mark.parametrize("form", MODULES)
def test_a_library_that_is_missing_is_named_with_its_pip_command(
    run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    import pandas as pd

    def no_parquet(*_: object, **__: object) -> None:
        raise ImportError("Unable to find a usable engine")

    for name in ("tensorboardX", "torch.utils.tensorboard", "wandb", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", no_parquet)
    with pytest.raises(ss.SpecError, match=rf"^format='{form}' needs .*; pip install {MODULES[form]}$"):
        run.export(tmp_path / "x", format=form)


def test_parquet_tables_are_those_of_the_run(run: ss.Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    folder = Path(run.export(tmp_path / "tables", format="parquet"))
    for name, frame in {
        "steps": run.metrics(),
        "spans": run.timeline(),
        "traffic": traffic_frame(run),
    }.items():
        pd.testing.assert_frame_equal(pd.read_parquet(folder / f"{name}.parquet"), frame, check_dtype=False)


def test_tensorboard_reads_the_figures_of_every_step(run: ss.Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(run.export(tmp_path / "board", format="tensorboard"))
    read.Reload()
    figures = figures_of(run)
    assert [(e.step, e.wall_time) for e in read.Scalars("loss")] == [(each.step, each.t) for each in figures]
    for tag in ("loss", "validation_loss", "test_accuracy"):
        expected = [each.numbers[tag] for each in figures if tag in each.numbers]
        assert [e.value for e in read.Scalars(tag)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_the_figures_offline(
    run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    try:
        folder = Path(run.export(tmp_path / "w", format="wandb"))
    finally:
        wandb.teardown()
    (file,) = folder.rglob("*.wandb")
    content = file.read_bytes()
    for each in figures_of(run):
        assert str(each.numbers["loss"]).encode() in content
    assert run.id.encode() in content


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_the_figures_of_every_step(run: ss.Run, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=run.export(tmp_path / "m", format="mlflow"))
    (kept,) = client.search_runs([client.get_experiment_by_name("shardscope").experiment_id])
    assert (kept.info.run_name, kept.info.status) == (run.id, "FINISHED")
    figures = figures_of(run)
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert sorted((m.step, m.value) for m in history) == [
        (each.step, each.numbers["loss"]) for each in figures
    ]
    assert kept.data.params["optimizer.lr"] == str(run.job.optimizer.lr)


def test_the_command_writes_a_file_named_after_the_run(
    run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run.path), "--format", "chrome-trace"]) == 0
    path = capsys.readouterr().out.strip()
    assert path == f"{run.path.name}-chrome-trace.json"
    assert read_trace(path)
    assert cli.main(["export", str(run.path), "--format", "chrome-trace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": run.id, "format": "chrome-trace", "path": path}
    with pytest.raises(ss.SpecError, match="did you mean 'parquet'"):
        run.export(tmp_path, format="parket")
