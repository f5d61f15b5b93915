"""The communication calculator without a browser: what it says, what it draws, how fast, and what it refuses."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import shardscope as ss
from shardscope.analytic.communication import ALGORITHMS, OPS, collective_time
from shardscope.analytic.communication.compression import compression_cost
from shardscope.errors import SpecError
from shardscope.measure.compression import codecs
from shardscope.spec.units import duration_text, faster_text
from shardscope_widgets import CommunicationCalculator, figures
from shardscope_widgets.communication_calculator._controls import Sliding
from shardscope_widgets.communication_calculator._views import FigureView
from shardscope_widgets.figures import _communication, _communication_plots
from shardscope_widgets.figures._communication_look import LOOKS
from shardscope_widgets.figures._who_sends import WORKERS, has_picture, picture, round_text, who_sends_svg

LINK = {"bandwidth": 12.5e9, "latency": 5e-6}
QUESTION = figures.CommunicationQuestion(
    algorithms=("parameter-server", "ring", "tree"), num_bytes=1e6, workers=64, **LINK
)


@pytest.fixture
def calculator():
    made = CommunicationCalculator()
    yield made
    made.close()


def test_curves_are_the_formulas_values() -> None:
    info = _communication.by_size_info(QUESTION)
    for line in info.lines:
        times = collective_time(
            op="all_reduce", algorithm=line.algorithm, num_bytes=line.x, workers=64, **LINK
        )
        assert line.seconds == pytest.approx(times)
        assert line.latency_s + line.bandwidth_s == pytest.approx(line.seconds)


def test_a_diamond_stands_where_two_curves_meet_and_is_named() -> None:
    info = _communication.by_size_info(QUESTION)
    assert [(c.below, c.above) for c in info.crossings] == [("parameter-server", "tree"), ("tree", "ring")]
    figure = figures.by_size(QUESTION)
    (diamonds,) = (trace for trace in figure.data if trace.name == "fastest algorithm changes here")
    assert list(diamonds.x) == [c.value for c in info.crossings]
    named = " ".join(annotation.text for annotation in figure.layout.annotations)
    assert "ring is fastest from 710 kB on" in named
    assert "tree becomes faster than parameter server at" in _communication_plots.curves_text(info).replace(
        "Tree", "tree"
    )


def test_hovering_shows_formula_inputs_and_source() -> None:
    (ring, *_) = (trace for trace in figures.by_size(QUESTION).data if trace.name == "ring")
    for part in (
        "2(W−1)α + 2(W−1)/W · S/B",
        "W = 64",
        "α = 5 µs",
        "B = 12.5 GB/s",
        "Patarasuk and Yuan 2009",
    ):
        assert part in ring.hovertemplate


def test_an_algorithm_that_cannot_is_left_out_with_its_reason() -> None:
    question = figures.CommunicationQuestion(
        algorithms=("ring", "hierarchical"), workers=12, options={"hierarchical": {"per_node": 8}}, **LINK
    )
    info = _communication.by_size_info(question)
    assert [line.algorithm for line in info.lines] == ["ring"]
    assert (
        "Left out: hierarchical (per_node=8 does not divide workers=12"
        in _communication_plots.curves_text(info)
    )
    workers = _communication.by_workers_info(question).lines[1].x
    assert all(count % min(8, count) == 0 for count in workers)


def test_efficiency_falls_with_workers_and_is_told() -> None:
    info = _communication.efficiency_info(QUESTION)
    for line in info.lines:
        assert (np.diff(line.strong) <= 0).all()
    assert "On 64 workers, the best of these algorithms reach" in _communication_plots.efficiency_text(info)


def test_an_algorithm_that_cannot_be_among_so_many_is_not_called_the_fastest() -> None:
    none = replace(
        QUESTION, algorithms=("parameter-server",), options={"parameter-server": {"servers": 65_536}}
    )
    assert _communication.efficiency_info(none).lines == ()
    many = replace(
        QUESTION, algorithms=("parameter-server", "tree"), options={"parameter-server": {"servers": 128}}
    )
    assert "tree is the fastest" in _communication_plots.curves_text(_communication.by_workers_info(many))
    assert ", tree)" in _communication_plots.efficiency_text(_communication.efficiency_info(many))
    alone = replace(QUESTION, workers=1)
    assert "none of these algorithms can run" in _communication_plots.curves_text(
        _communication.by_workers_info(alone)
    )


def test_algorithms_that_are_equally_fast_are_all_named() -> None:
    tied = replace(QUESTION, algorithms=("double-binary-tree", "halving-doubling", "tree"), num_bytes=1e8)
    names = "double binary tree and halving-doubling"
    assert f"{names} are the fastest of these algorithms" in _communication_plots.curves_text(
        _communication.by_size_info(tied)
    )
    assert f"(weak scaling, {names})" in _communication_plots.efficiency_text(
        _communication.efficiency_info(tied)
    )


@pytest.mark.parametrize("op", OPS)
def test_every_operation_draws_every_tab(op: str, calculator: CommunicationCalculator) -> None:
    calculator.algorithms = list(ALGORITHMS)
    calculator.op = op
    for index in range(len(calculator.views)):
        calculator.tabs.selected_index = index
        assert calculator.problem.value == ""
    assert calculator.table.value.count("<tr") == len(calculator.able) + 1


def test_controls_and_traits_are_one(calculator: CommunicationCalculator) -> None:
    calculator.workers = 256
    assert calculator.controls["workers"].value == 256
    calculator.controls["bandwidth_unit"].value = "GB/s"
    assert calculator.question.bandwidth == 100e9
    calculator.ways.boxes["ring"].value = False
    assert "ring" not in calculator.algorithms
    calculator.algorithms = ["tree", "ring"]
    assert [name for name, box in calculator.ways.boxes.items() if box.value] == ["ring", "tree"]
    assert "256 workers, 100 GB/s in each direction (800 Gbit/s)" in calculator.status.value
    assert "Ring is the fastest, " in calculator.status.value
    calculator.algorithms = ["tree"]
    assert "Tree, " in calculator.status.value


def test_the_size_of_a_message_can_be_typed(calculator: CommunicationCalculator) -> None:
    box = Sliding(calculator, calculator.controls["num_bytes"])
    assert box.size.value == "100 MB"
    box.size.value = "25 MB"
    assert calculator.num_bytes == 25e6
    for refused in ("many", "1 TB", "-5 MB", ""):
        box.size.value = refused
        assert (box.size.value, calculator.num_bytes) == ("25 MB", 25e6)
    box.children[-1].value = 26.1e6  # the slider's place nearest to what was typed
    assert calculator.num_bytes == 25e6
    box.children[-1].value = 1e9
    assert (calculator.num_bytes, box.size.value) == (1e9, "1 GB")


def test_the_table_is_sorted_and_the_words_name_the_fastest(calculator: CommunicationCalculator) -> None:
    calculator.algorithms = ["parameter-server", "ring"]
    calculator.num_bytes = 1e9
    rows = calculator.table.value.split("<tr")[2:]
    assert "ring" in rows[0]
    assert "parameter server" in rows[1]
    assert "ring is the fastest of these algorithms" in calculator.views["Message size"].words.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": -1}, "bandwidth=-1 is out of range; give a value of 1e-06 or more"),
        ({"bandwidth_unit": "Gb"}, "bandwidth_unit='Gb' is not known; did you mean 'Gbit/s'"),
        ({"workers": 0}, "workers=0 is out of range; give a value of 1 or more"),
        ({"latency_us": -5}, "latency_us=-5 is out of range"),
        ({"overlap": 2}, "overlap=2 is out of range; give a value from 0 to 1"),
        ({"algorithms": ["rign"]}, "algorithms='rign' is not known; did you mean 'ring'"),
        ({"op": "sum"}, "op='sum' is not known"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CommunicationCalculator(**change)


def test_an_unknown_choice_is_named() -> None:
    with pytest.raises(TypeError, match="has no option 'speed'"):
        CommunicationCalculator(speed=1)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if has_picture(name)])
def test_pictures_send_from_a_worker_to_another_and_are_told(name: str) -> None:
    shown = picture(name)
    for number, round_ in enumerate(shown.rounds):
        ends = {rank for arrow in round_.arrows for rank in arrow}
        assert ends <= set(range(WORKERS + bool(shown.middle)))
        assert all(a != b for a, b in round_.arrows)
        svg = who_sends_svg(shown, number, "#e06c2c")
        assert svg.count("marker-end") == len(round_.arrows)
        said = round_text(shown, number)
        assert f"round {number + 1} of {len(shown.rounds)}" in said
        assert said.endswith("each.") == (len(round_.arrows) > 1)


@pytest.mark.parametrize(
    "name", ["ring", "tree", "halving-doubling", "recursive-doubling", "parameter-server"]
)
def test_pictures_have_as_many_rounds_as_the_formula_has_steps(name: str) -> None:
    steps = collective_time(
        op="all_reduce", algorithm=name, num_bytes=1, workers=WORKERS, bandwidth=np.inf, latency=1
    )
    assert len(picture(name).rounds) == steps


def test_every_algorithm_has_a_look_of_its_own_among_those_beside_it() -> None:
    for op in OPS:
        layer_samples = [LOOKS[name] for name, algorithm in ALGORITHMS.items() if op in algorithm.costs]
        assert len({(look.colour, look.dash) for look in layer_samples}) == len(layer_samples)


def test_it_is_offered_by_name() -> None:
    import shardscope_widgets

    assert shardscope_widgets.CommunicationCalculator is CommunicationCalculator


COMPRESSED = {"num_bytes": 1e8, "workers": 64, "bandwidth": 10.0, "compute_ms": 100.0, "latency_us": 5.0}


def test_the_compression_tab_has_the_curve_of_the_formulas() -> None:
    calculator = CommunicationCalculator(**COMPRESSED, memory_bandwidth=1000.0)
    calculator.tabs.selected_index = list(calculator.views).index("Compression")
    view = calculator.views["Compression"]
    plain, int4 = (
        compression_cost(method, 2.5e7, 64, 1.25e9, latency=5e-6, codec_bandwidth=1e12)
        for method in ("none", "int4")
    )
    gain = (0.1 + float(plain.total_s)) / (0.1 + float(int4.total_s))
    assert (
        f"with int4 instead of {duration_text(0.1 + float(plain.total_s))}: {faster_text(gain)}"
        in view.words.value
    )
    limit, _, rest = figures.caption(figures.compression_speedup, calculator.question).partition(" On a link")
    assert limit in calculator.status.value
    assert rest in view.words.value
    before = view.words.value
    calculator.memory_bandwidth = 2.0
    assert view.words.value != before
    calculator.op = "all_gather"
    assert "exchanged by an all-reduce" in str(view.figure.figure["layout"]["annotations"])


def test_the_compression_tab_moves_my_link_with_the_bandwidth() -> None:
    calculator = CommunicationCalculator(**COMPRESSED)
    calculator.tabs.selected_index = list(calculator.views).index("Compression")
    for bandwidth in (10.0, 25.0):
        calculator.bandwidth = bandwidth
        layout = calculator.views["Compression"].figure.figure["layout"]
        assert layout["shapes"][0]["x0"] == pytest.approx(bandwidth * 1e9)
        assert not layout["sliders"]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ss.Job:
    monkeypatch.setattr(
        codecs, "packing_seconds", lambda jobs, _buckets: [0.001 * job.compression.is_on for job in jobs]
    )
    link = ss.Link(bandwidth="10 Mbit/s", latency="1 ms")
    return ss.Job(model="mlp", data="digits", world_size=2, link=link, strategy="ring")


def open_compression(calculator: CommunicationCalculator) -> FigureView:
    calculator.tabs.selected_index = list(calculator.views).index("Compression")
    if calculator._of_job is not None:
        calculator._of_job.wait(60)
    return calculator.views["Compression"]


def test_a_job_is_shown_until_its_step_is_changed(job: ss.Job) -> None:
    calculator = CommunicationCalculator(job=job)
    found = ss.compression_speedup(job)
    words = open_compression(calculator).words
    assert (calculator.workers, calculator.bandwidth, calculator.latency_us) == (2, pytest.approx(0.01), 1000)
    assert found.limit in calculator.status.value
    assert "mlp, ring, 2 ranks: compression times were measured on this machine" in words.value
    assert calculator.controls["memory_bandwidth"].disabled, "packing was measured"
    calculator.num_bytes *= 1.04  # the slider moves a value to its nearest place
    calculator.bandwidth = 0.1
    assert found.limit in calculator.status.value
    assert found.at("100 Mbit/s").verdict in words.value
    calculator.workers = 4
    assert "compression times were measured" not in words.value
    assert not calculator.controls["memory_bandwidth"].disabled
    assert calculator.children[0].code == "", "code without the job would give another curve"
    assert CommunicationCalculator().children[0].code


def test_inputs_given_beside_a_job_are_not_its_step(job: ss.Job) -> None:
    calculator = CommunicationCalculator(job=job, workers=256)
    assert "compression times were measured" not in open_compression(calculator).words.value
    calculator.workers = 2
    assert "compression times were measured" in open_compression(calculator).words.value


def test_packing_is_timed_when_the_tab_is_opened_and_not_before(
    job: ss.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, timed = threading.Event(), []

    def packing_seconds(jobs: list[ss.Job], _buckets: object) -> list[float]:
        packed = [job.compression.is_on for job in jobs]
        if any(packed):
            may_end.wait(60)
            timed.append(packed)
        return [0.001 * is_on for is_on in packed]

    monkeypatch.setattr(codecs, "packing_seconds", packing_seconds)
    calculator = CommunicationCalculator(job=job)
    assert calculator._of_job is not None
    assert calculator._of_job._thread is None
    view = calculator.views["Compression"]
    calculator.tabs.selected_index = list(calculator.views).index("Compression")
    assert "Timing compression" in str(view.figure.figure["layout"]["annotations"])
    may_end.set()
    open_compression(calculator)
    assert view.figure.figure["data"]
    assert "compression times were measured" in view.words.value
    calculator.bandwidth = 0.1
    assert len(timed) == 1


def test_packing_is_timed_again_on_request(job: ss.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(codecs, "forget_timings", lambda: forgotten.append(True))
    calculator = CommunicationCalculator(job=job)
    open_compression(calculator)
    before = calculator.status.value
    slow = lambda jobs, _buckets: [0.5 * job.compression.is_on for job in jobs]
    monkeypatch.setattr(codecs, "packing_seconds", slow)
    calculator.again.click()
    open_compression(calculator)
    assert (forgotten, calculator.status.value != before) == ([True], True)
    assert calculator.again.layout.display is None
    calculator.workers = 4
    assert calculator.again.layout.display == "none"


def test_the_status_answers_the_question_of_the_open_tab_and_no_other() -> None:
    calculator = CommunicationCalculator()
    assert "is the fastest" in calculator.status.value
    open_compression(calculator)
    assert "is the fastest" not in calculator.status.value
    assert "Compression pays off" in calculator.status.value
    assert "Over a ring: " in calculator.status.value
    assert calculator.table.layout.display == "none"
    calculator.workers = 16
    assert "16 workers" in calculator.status.value
    calculator.tabs.selected_index = 0
    assert "is the fastest" in calculator.status.value
    assert "16 workers" in calculator.status.value
    assert calculator.table.layout.display is None
    calculator.op = "all_gather"
    open_compression(calculator)
    assert "Compressed gradients are exchanged by an all-reduce." in calculator.status.value


def test_every_bandwidth_is_labelled_with_its_unit() -> None:
    calculator = CommunicationCalculator()
    labels = [calculator.controls[name].description for name in ("bandwidth", "inner_bandwidth")]
    assert labels == ["Bandwidth, Gbit/s", "Within a node, Gbit/s"]
    calculator.bandwidth_unit = "GB/s"
    assert calculator.controls["inner_bandwidth"].description == "Within a node, GB/s"


def test_what_stops_the_timing_is_said(job: ss.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    calculator = CommunicationCalculator(job=job)

    def packing_seconds(*_: object) -> list[float]:
        raise OSError("no memory")

    monkeypatch.setattr(codecs, "packing_seconds", packing_seconds)
    view = open_compression(calculator)
    assert "OSError: no memory" in str(view.figure.figure["layout"]["annotations"])
