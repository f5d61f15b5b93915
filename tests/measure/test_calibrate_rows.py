"""`ss.calibrate(rows=...)`: measured steps of a GPU cluster move constants as far as they determine them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import shardscope as ss
from shardscope import cli
from shardscope.calibration.spread import FACTORS, moved
from shardscope.errors import DataError, SpecError
from shardscope.measure.calibrate.rows import Row
from shardscope.measure.calibrate.tables import Given, read_rows
from shardscope.spec.model import Mixture, Transformer

CLUSTER = ss.Cluster.of("a100-80gb", nodes=4)
MODEL = ss.Model.of("llama-2-13b")
LAYOUTS = [
    ss.Layout(data=d, tensor=t, pipeline=p, micro_batch=b, global_batch=256, recompute="full")
    for d, t, p, b in [
        (4, 8, 1, 1),
        (8, 4, 1, 1),
        (4, 4, 2, 2),
        (2, 8, 2, 2),
        (2, 4, 4, 4),
        (16, 2, 1, 1),
        (4, 2, 4, 1),
    ]
]


def seconds(layout: ss.Layout, calibration: ss.Calibration | None = None) -> float:
    return ss.predict(MODEL, CLUSTER, layout, calibration=calibration).step_time_s


def row(layout: ss.Layout, time_s: float, **more: object) -> dict[str, object]:
    degrees = ("data", "tensor", "pipeline", "micro_batch", "global_batch", "recompute")
    return {**{name: getattr(layout, name) for name in degrees}, "step_time_s": time_s, **more}


def test_one_row_moves_the_scale_and_narrows_the_interval() -> None:
    measured = 1.25 * seconds(LAYOUTS[0])
    mine = ss.calibrate(CLUSTER, rows=[row(LAYOUTS[0], measured)], model=MODEL)
    before, after = (
        ss.predict(MODEL, CLUSTER, LAYOUTS[0]),
        ss.predict(MODEL, CLUSTER, LAYOUTS[0], calibration=mine),
    )
    assert after.step_time_s == pytest.approx(measured, rel=0.06)
    assert all(seconds(other, mine) > 1.08 * seconds(other) for other in LAYOUTS[1:])
    widths = [np.log(each.interval.high / each.interval.low) for each in (before, after)]
    assert widths[1] < 0.8 * widths[0]
    assert not mine.scores, "one row cannot be cross-validated"


@pytest.mark.parametrize(("factor", "most"), [(0.71, 1.14), (0.6, 1.28)])
def test_a_row_faster_than_predicted_is_fitted_as_well_as_constants_below_1_allow(
    factor: float, most: float
) -> None:
    measured = factor * seconds(LAYOUTS[0])
    mine = ss.calibrate(CLUSTER, rows=[row(LAYOUTS[0], measured)], model=MODEL)
    assert 1.0 < seconds(LAYOUTS[0], mine) / measured < most


def test_rows_far_from_any_prediction_are_refused_or_named() -> None:
    usual = seconds(LAYOUTS[0])
    with pytest.raises(SpecError, match="is not plausible.*check the unit"):
        ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], 1000 * usual), model=MODEL)
    slow = ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], 6 * usual), model=MODEL)
    assert "standard deviations slower than" in slow.note or "outside its own 90 % interval" in slow.note
    fast = ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], 0.5 * usual), model=MODEL)
    assert "outside its own 90 % interval" in fast.note
    usual_note = ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], 1.2 * usual), model=MODEL).note
    assert "check its unit" not in usual_note


def test_a_row_that_is_faster_than_its_devices_can_compute_is_refused() -> None:
    found = ss.predict(MODEL, CLUSTER, LAYOUTS[0])
    at_peak = found.mfu * found.step_time_s
    with pytest.raises(SpecError, match=r"would be 1\d\d% of the devices' peak FLOP/s; check the unit"):
        ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], at_peak / 1.2), model=MODEL)
    mine = ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], at_peak / 0.95), model=MODEL)
    assert "outside its own 90 % interval" in mine.note


@pytest.mark.parametrize(
    ("factor", "device", "software", "each_within", "median_within"),
    [
        (3.0, "a100-80gb", "megatron-core", 0.25, 0.1),
        pytest.param(3.0, "h100-80gb", "fsdp2", 0.2, 0.1, marks=pytest.mark.slow),
        pytest.param(5.0, "a100-80gb", "megatron-core", 0.3, 0.15, marks=pytest.mark.slow),
    ],
)
def test_rows_that_agree_with_each_other_are_not_outliers_however_far_from_the_prediction(
    factor: float, device: str, software: str, each_within: float, median_within: float
) -> None:
    """Constants that move far no longer keep the ratios of layouts, so errors that are left grow with the factor."""
    cluster = ss.Cluster.of(device, nodes=4)
    sharded = {"data": 32, "tensor": 1, "pipeline": 1, "zero": 3} if software == "fsdp2" else {}
    layouts = [
        LAYOUTS[0].replace(recompute=recompute, micro_batch=batch, **sharded)
        for batch, recompute in ((1, "none"), (2, "full"), (1, "full"))
    ]

    def timed(layout: ss.Layout, calibration: ss.Calibration | None = None) -> float:
        found = ss.predict(MODEL, cluster, layout, calibration=calibration, software=software)
        return found.step_time_s

    rows = [row(each, factor * timed(each), zero=each.zero, software=software) for each in layouts]
    mine = ss.calibrate(cluster, rows=rows, model=MODEL)
    after = [timed(each, mine) / (factor * timed(each)) for each in layouts]
    assert after == pytest.approx([1.0] * 3, abs=each_within)
    assert np.median(after) == pytest.approx(1.0, abs=median_within)
    assert f"all 3 rows are about {factor:.2g} times slower than" in mine.note


def test_rows_with_equal_times_have_scores_without_a_rank() -> None:
    mine = ss.calibrate(CLUSTER, rows=[row(layout, 30.0) for layout in LAYOUTS[:3]], model=MODEL)
    assert "rank" not in mine.scores["rows, cross-validated"]
    assert mine.scores["rows, cross-validated"]["mape"] > 0
    assert "rows, cross-validated" in repr(mine)


def test_a_constant_of_1_moves_down_and_widens_intervals() -> None:
    layout = ss.Layout(data=32, zero=3, global_batch=64)
    before = ss.Calibration.of("a100-fsdp").replace(inter_efficiency=1.0, shard_overlap=0.0)
    found = ss.predict(MODEL, CLUSTER, layout, calibration=before)
    assert dict(found.uncertainty.shares)["inter_efficiency"] > 0
    slow = row(layout, 2 * found.step_time_s, zero=3)
    mine = ss.calibrate(CLUSTER, rows=[slow], model=MODEL, prior=before, software=before.software)
    assert mine.inter_efficiency < 0.9


def test_rows_find_the_constants_that_made_them_and_name_the_row_that_does_not_fit() -> None:
    step = dict.fromkeys(FACTORS, 0.0) | {"scale": 0.1, "intra_efficiency": -0.3}
    truth = moved(ss.predict(MODEL, CLUSTER, LAYOUTS[0]).calibration, list(step.values()))
    rows = [row(layout, seconds(layout, truth), label=f"run {place}") for place, layout in enumerate(LAYOUTS)]
    rows[3]["step_time_s"] *= 2.5
    mine = ss.calibrate(CLUSTER, rows=pd.DataFrame(rows), model=MODEL)
    others = [layout for place, layout in enumerate(LAYOUTS) if place != 3]
    assert [seconds(each, mine) for each in others] == pytest.approx(
        [seconds(each, truth) for each in others], rel=0.03
    )
    assert mine.rows[3].weight < 0.2
    assert min(each.weight for each in mine.rows if each.label != "run 3") > 0.5
    assert "run 3 is an outlier" in mine.note
    assert "run 3" in repr(mine)
    assert mine.scores["rows, cross-validated"]["rows"] == len(LAYOUTS)


def test_a_row_is_recognised_by_what_differs_from_defaults_so_a_new_field_changes_no_key() -> None:
    class NextLayout(ss.Layout):
        new: str = "usual"

    class NextModel(Transformer):
        new: str = "usual"

    def key(model: ss.Model, layout: ss.Layout) -> str:
        (found,) = read_rows([{"global_batch": 8, "step_time_s": 1.0}], Given(CLUSTER, model, layout, "nemo"))
        return found.key

    layout, model = ss.Layout(tensor=8, data=4, global_batch=8), MODEL.model_dump()
    later = key(NextModel(**model), NextLayout(**layout.model_dump()))
    assert key(MODEL, layout) == later != key(MODEL, layout.replace(tensor=4, data=8))


def test_a_calibration_is_refined_by_further_rows_and_survives_a_file(tmp_path: Path) -> None:
    first = ss.calibrate(CLUSTER, rows=row(LAYOUTS[0], 1.3 * seconds(LAYOUTS[0])), model=MODEL)
    first = ss.Calibration.load(first.save(tmp_path / "mine.json"))
    second = ss.calibrate(CLUSTER, rows=row(LAYOUTS[2], 1.3 * seconds(LAYOUTS[2])), model=MODEL, prior=first)
    assert seconds(LAYOUTS[2], second) == pytest.approx(1.3 * seconds(LAYOUTS[2]), rel=0.05)
    assert ss.predict(MODEL, CLUSTER, LAYOUTS[2], calibration=second).uncertainty.between < (
        ss.predict(MODEL, CLUSTER, LAYOUTS[2], calibration=first).uncertainty.between
    )
    assert second.rows[0] == first.rows[0]
    assert len(second.rows) == 2
    assert set(first.fitted) < set(second.fitted)
    assert "by 2 measured steps" in second.name
    with pytest.raises(SpecError, match=r"rows\[0\] was already fitted by prior=.* and would count twice"):
        ss.calibrate(CLUSTER, rows=row(LAYOUTS[2], 1.3 * seconds(LAYOUTS[2])), model=MODEL, prior=second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_time_s": None}, r"rows\[1\]: has no measured time; give one of step_time_s"),
        ({"tokens_per_s": 5.0}, "has step_time_s and tokens_per_s"),
        ({"step_time_s": -1.0}, "step_time_s=-1.0 is not a measurement"),
        ({"step_time_s": 10**400}, "is not a measurement"),
        ({"tensr": 2}, r"rows\[1\]: column='tensr' is not known; did you mean 'tensor'"),
        ({"global_batch": None}, "global_batch is missing"),
        ({"data": 3}, r"rows\[1\]: global_batch=256 is not a multiple of data=3"),
        ({"device": "h100-80gb"}, r"rows\[1\]: device='h100-80gb' contradicts the given cluster, which has 'a100"),
        ({"per_node": 4}, r"rows\[1\]: per_node=4 contradicts the given cluster, which has 8"),
        ({"nodes": 4}, "column='nodes' is not known"),
        ({"seq": 2048.7}, "seq=2048.7 is not an integer"),
        ({"seq": "x"}, "seq='x' is not an integer"),
        ({"software": "fsdp2"}, "the software is 'megatron-core' in rows.0. and 'fsdp2' in rows.1."),
        ({"software": "megatorn"}, "software='megatorn' is not known; did you mean 'megatron-core'"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_are_refused_with_their_number(
    change: dict[str, object], message: str
) -> None:
    good = row(LAYOUTS[0], 20.0)
    with pytest.raises(SpecError, match=message):
        ss.calibrate(CLUSTER, rows=[good, {**good, **change}], model=MODEL)


def test_arguments_without_rows_are_refused() -> None:
    for arguments in ({"model": MODEL}, {"layout": LAYOUTS[0]}, {"software": "fsdp2"}):
        with pytest.raises(SpecError, match="has no effect without rows"):
            ss.calibrate(**arguments)
    with pytest.raises(SpecError, match="has no row"):
        ss.calibrate(CLUSTER, rows=[], model=MODEL)
    with pytest.raises(SpecError, match="the cluster is missing"):
        ss.calibrate(rows=[row(LAYOUTS[0], 1.0)], model=MODEL)


@pytest.mark.parametrize(
    ("header", "cells", "message"),
    [
        ("data,global_batch,tokens_per_s", "8,64,52,428", "has 4 cells in line 2, but 3 columns; write numbers"),
        ("data,global_batch,step_time_s,data", "8,64,1.5,4", "has the column 'data' twice"),
        ("step_time_s", "1.5", "global_batch is missing"),
    ],
)  # fmt: skip
def test_a_csv_file_whose_cells_are_ambiguous_is_refused(
    tmp_path: Path, header: str, cells: str, message: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n{cells}\n")
    with pytest.raises(SpecError, match=message):
        ss.calibrate(CLUSTER, rows=path, model=MODEL, layout=ss.Layout(recompute="full"))


def read(path: Path, **given: object) -> Row:
    (found,) = read_rows(path, Given(**{"cluster": CLUSTER, **given}))  # type: ignore[arg-type]
    return found


def test_tables_of_excel_are_read(tmp_path: Path) -> None:
    for name, delimiter in (("ROWS.CSV", ","), ("rows.csv", ";"), ("rows.tsv", "\t")):
        path = tmp_path / name
        lines = [("data", "global_batch", "step_time_s"), ("8", "64", "1.5")]
        path.write_text("\n".join(map(delimiter.join, lines)), encoding="utf-8-sig")
        found = read(path, model=MODEL)
        assert (found.layout.data, found.layout.global_batch, found.seconds) == (8, 64, 1.5)


def test_numbers_of_numpy_are_numbers_and_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    cells = {"global_batch": 64, "step_time_s": np.float32(1.5), "seq": np.int64(1024)}
    (found,) = read_rows(cells, Given(CLUSTER, MODEL))
    assert (found.seconds, found.model.seq) == (1.5, 1024)
    path = tmp_path / "rows.json"
    for text in ("5", "null"):
        path.write_text(text)
        with pytest.raises(SpecError, match="is not a list of rows"):
            read(path, model=MODEL)
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="is not JSON"):
        read(path, model=MODEL)


def test_one_row_of_a_data_frame_is_a_row_and_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame([row(LAYOUTS[0], 20.0), row(LAYOUTS[1], 21.0)])
    (found,) = read_rows(frame.iloc[1], Given(CLUSTER, MODEL))
    assert (found.layout.tensor, found.seconds) == (4, 21.0)
    path = tmp_path / "rows.csv"
    path.write_text("data,step_time_s\n" + "8" * 200_000)
    with pytest.raises(DataError, match="is not a table"):
        read(path, model=MODEL)


ARGUMENTS = """\
------------------------ arguments ------------------------
  bf16 ............................................ True
  data_parallel_size .............................. 4
  global_batch_size ............................... 256
  hidden_size ..................................... 5120
  micro_batch_size ................................ 1
  num_attention_heads ............................. 40
  num_experts ..................................... None
  num_layers ...................................... 40
  recompute_granularity ........................... full
  seq_length ...................................... 8192
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 8
  transformer_impl ................................ transformer_engine
  use_distributed_optimizer ....................... True
-------------------- end of arguments ---------------------
 > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)
"""


def steps_of(times_ms: list[float]) -> str:
    return "\n".join(
        f" iteration {n + 1:8}/      10 | consumed samples: 1 | elapsed time per iteration (ms): {ms} | loss"
        for n, ms in enumerate(times_ms)
    )


STEPS = steps_of([90000.0, 40000.0, 20010.0, 20000.0, 19990.0])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(ARGUMENTS + STEPS)
    return path


def test_a_log_of_megatron_states_its_model_layout_and_steps(log: Path) -> None:
    found = read(log)
    assert (found.inputs["label"], found.seconds, found.software) == ("train.log", 20.0, "megatron-core")
    model, layout = found.model, found.layout
    assert (model.layers, model.hidden, model.heads, model.seq, model.vocab) == (40, 5120, 40, 8192, 51200)
    assert layout == ss.Layout(
        data=4, tensor=8, global_batch=256, zero=1, recompute="full", sequence_parallel=True
    )
    assert read(log, software="megatron-deepspeed").software == "megatron-deepspeed"
    log.write_text((ARGUMENTS + STEPS).replace("distributed_optimizer", "torch_fsdp2"))
    assert read(log).layout.zero == 3


@pytest.mark.parametrize(
    ("method", "count", "stages", "virtual", "recomputed"),
    [
        ("block", "7", "2", "None", ("full", 7)),
        ("block", "3", "2", "5", ("full", 3)),
        ("block", "4", "2", "5", ("full", 0)),
        ("block", "50", "1", "None", ("full", 0)),
        ("block", "0", "1", "None", ("none", 0)),
        ("uniform", "1", "2", "None", ("full", 0)),
    ],
)
def test_a_log_of_megatron_says_how_many_layers_a_stage_recomputes(
    log: Path, method: str, count: str, stages: str, virtual: str, recomputed: tuple[str, int]
) -> None:
    more = f"""\
  pipeline_model_parallel_size .................... {stages}
  recompute_method ................................ {method}
  recompute_num_layers ............................ {count}
  virtual_pipeline_model_parallel_size ............ {virtual}
  seq_length"""
    log.write_text((ARGUMENTS + STEPS).replace("  seq_length", more))
    given = Given(ss.Cluster.of("a100-80gb", nodes=4 * int(stages)))
    (found,) = read_rows(log, given)
    assert (found.layout.recompute, found.layout.recompute_layers) == recomputed
    log.write_text(
        log.read_text().replace(
            f"layers ............................ {count}", "layers ............................ None"
        )
    )
    if method == "block":
        with pytest.raises(SpecError, match="recompute_num_layers=None does not say how many layers"):
            read_rows(log, given)


@pytest.mark.parametrize(
    ("stages", "first", "last", "is_known"),
    [
        (2, "20", "20", True),
        (14, "2", "2", True),
        (2, "18", "None", False),
        (4, "9", "9", False),
        (1, "7", "7", True),
    ],
)
def test_a_log_of_megatron_with_other_layers_at_the_ends_of_the_pipeline_is_refused(
    log: Path, stages: int, first: str, last: str, *, is_known: bool
) -> None:
    more = f"""\
  pipeline_model_parallel_size .................... {stages}
  decoder_first_pipeline_num_layers ............... {first}
  decoder_last_pipeline_num_layers ................ {last}
  seq_length"""
    log.write_text((ARGUMENTS + STEPS).replace("  seq_length", more))
    given = Given(ss.Cluster.of("a100-80gb", nodes=4 * stages))
    if is_known:
        assert read_rows(log, given)[0].layout.pipeline == stages
    else:
        with pytest.raises(
            SpecError, match=f"decoder_first_pipeline_num_layers={first} .* with (10|20) for both"
        ):
            read_rows(log, given)


@pytest.mark.parametrize(("count", "recomputed"), [(7, 7), (8, 0)])
def test_numbers_of_recomputed_layers_are_those_of_the_stages_between_shorter_ends(
    log: Path, count: int, recomputed: int
) -> None:
    more = f"""\
  pipeline_model_parallel_size .................... 16
  decoder_first_pipeline_num_layers ............... 7
  decoder_last_pipeline_num_layers ................ 7
  recompute_method ................................ block
  recompute_num_layers ............................ {count}
  seq_length"""
    layers = "num_layers ...................................... "
    log.write_text((ARGUMENTS + STEPS).replace("  seq_length", more).replace(f"{layers}40", f"{layers}126"))
    (found,) = read_rows(log, Given(ss.Cluster.of("a100-80gb", nodes=64)))
    assert (found.layout.recompute, found.layout.recompute_layers) == ("full", recomputed)


def test_a_log_of_a_mixture_of_experts_states_the_sequence_length(log: Path) -> None:
    log.write_text((ARGUMENTS + STEPS).replace("num_experts ..................................... None",
                                               "num_experts ..................................... 8"))  # fmt: skip
    mixture = MODEL.replace(vocab=51200, mixture=Mixture(experts=8, active=2, ffn=MODEL.ffn))
    assert read(log, model=mixture).model == mixture.replace(seq=8192)
    with pytest.raises(SpecError, match="num_experts=8, but model='llama-2-13b' has no experts"):
        read(log, model=MODEL)
    with pytest.raises(SpecError, match="the model is missing"):
        read(log)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STEPS, "the model is missing"),
        (ARGUMENTS.replace("num_layers", "layers") + STEPS, "without num_layers; give the whole log"),
        (ARGUMENTS.replace(". 40", ". None") + STEPS, "without num_layers, num_attention_heads"),
        (ARGUMENTS + steps_of([90000.0, 40000.0]), "has 2 logged steps, and the first 2 are left out as warm-up"),
        (ARGUMENTS + STEPS + "\n" + ARGUMENTS.replace(". 256", ". 512") + STEPS,
         "differs between starts, with global_batch_size=256 and global_batch_size=512; give one file per run"),
        (ARGUMENTS + STEPS + "\n" + STEPS, "goes back from step 5 to 1, so it has several runs"),
        ((ARGUMENTS + STEPS).replace("(ms): ", "(ms): ."), "has no step of Megatron"),
        (ARGUMENTS.replace("size .............................. 4", "size .............................. None") + STEPS,
         "states data_parallel_size=None, which is not a number of ranks"),
        (ARGUMENTS.replace("data_parallel_size .............................. 4", "world_size ..................... 60")
         + STEPS, "world_size=60, which is not a multiple of the 8 ranks of one replica"),
    ],
    ids=["no arguments", "no layers", "no numbers", "warm-up only", "two runs", "two runs' steps", "no time",
         "no replicas", "part of a replica"],
)  # fmt: skip
def test_an_incomplete_or_ambiguous_log_is_refused(log: Path, text: str, message: str) -> None:
    log.write_text(text)
    with pytest.raises((SpecError, DataError), match=message):
        read(log)


def test_a_given_model_that_contradicts_the_log_is_refused(log: Path) -> None:
    with pytest.raises(SpecError, match="of 40 layers of 5120, but model='llama-2-7b' has 32 layers of 4096"):
        read(log, model=ss.Model.of("llama-2-7b"))


def titan(path: Path) -> Path:
    lines = (f"\x1b[31mstep: {n}  loss: 8.0  memory: 39GiB  \x1b[34mtps: 1,{n}00" for n in range(1, 6))
    path.write_text("\n".join(lines))
    return path


def test_a_log_of_torchtitan_needs_the_layout(tmp_path: Path) -> None:
    path = titan(tmp_path / "titan.log")
    with pytest.raises(SpecError, match="global_batch is missing"):
        ss.calibrate(CLUSTER, rows=path, model=MODEL)
    layout = ss.Layout(data=32, zero=3, global_batch=64)
    mine = ss.calibrate(CLUSTER, rows=path, model=MODEL, layout=layout)
    assert mine.software == "torchtitan"
    assert mine.rows[0].measured_s == pytest.approx(64 * MODEL.seq / (1400 * 32))
    assert read(path, model=MODEL, layout=layout, software="fsdp2").software == "fsdp2"
    path.write_text("no steps here")
    with pytest.raises(DataError, match="has no step of Megatron"):
        ss.calibrate(CLUSTER, rows=path, model=MODEL)


def test_the_command_line_calibrates_with_a_file_and_predicts_with_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, saved = tmp_path / "rows.csv", tmp_path / "mine.json"
    pd.DataFrame([row(layout, 1.5 * seconds(layout)) for layout in LAYOUTS[:3]]).to_csv(rows, index=False)
    arguments = ["calibrate", "--rows", str(rows), "--model", "llama-2-13b", "--device", "a100-80gb"]
    assert cli.main([*arguments, "--output", str(saved)]) == 0
    assert "by 3 measured steps" in capsys.readouterr().out
    layout = ["--data", "4", "--tensor", "8", "--global-batch", "256", "--recompute", "full"]
    cli.main(["predict", "llama-2-13b", "a100-80gb", "--nodes", "4", *layout, "--calibration", str(saved)])
    assert "by 3 measured steps" in capsys.readouterr().out


def test_the_command_line_takes_the_layout_of_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = titan(tmp_path / "titan.log")
    arguments = ["calibrate", "--rows", str(path), "--model", "llama-2-13b", "--device", "a100-80gb"]
    layout = ["--data", "32", "--zero", "3", "--global-batch", "64", "--seq", "1024"]
    assert cli.main([*arguments, *layout, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert found["measured_s"] == pytest.approx(64 * 1024 / (1400 * 32))
    for more, message in [
        ([*arguments, "--no-save"], "--no-save has no effect with --rows"),
        ([*arguments, "--root", str(tmp_path)], "--root has no effect with --rows"),
        (["calibrate", "--tensor", "8"], "--tensor has no effect without --rows"),
        (["calibrate", "--rows", str(path), "--seq", "1024"], "--seq has no effect without --model"),
        ([*arguments[:-2], *layout], "--device a100-80gb"),
    ]:
        assert cli.main(more) != 0
        assert message in capsys.readouterr().err
