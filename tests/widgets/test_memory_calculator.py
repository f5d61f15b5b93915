"""The Memory Calculator without a browser: traits, verdict, figure, errors in place."""

from __future__ import annotations

import re
import time

import pytest

from shardscope.analytic.memory import memory_term, stage_memory
from shardscope.errors import SpecError
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model
from shardscope.spec.units import gib_text
from shardscope_widgets import MemoryCalculator, figures
from shardscope_widgets.figures import _memory_plan
from shardscope_widgets.figures._memory_plan import GIB, symbols_text, table_rows

GPT3 = {
    "model": "gpt3-175b",
    "data": 8,
    "tensor": 8,
    "pipeline": 8,
    "zero": 1,
    "micro_batch": 4,
    "sequence_parallel": True,
}
TRILLION = Model.transformer(name="1T", layers=128, hidden=25600, heads=160, vocab=51200, seq=2048)


@pytest.fixture
def calculator():
    made = MemoryCalculator(**GPT3)
    yield made
    made.close()


def test_bars_are_the_bytes_of_the_formulas(calculator):
    device = Device.of(calculator.device)
    held = stage_memory(calculator.chosen_model(), calculator.chosen_layout(), device=device)
    assert [stage.num_bytes for stage in calculator.info.stages] == pytest.approx(held.total.tolist())
    bars = [trace for trace in calculator.figure.traces if trace["type"] == "bar"]
    drawn = [sum(trace["x"][place] for trace in bars if place in trace["y"]) for place in range(1)]
    assert drawn[0] * GIB == pytest.approx(held.total[0])


def test_degrees_that_are_not_given_are_one():
    mine = MemoryCalculator(model="llama-3-8b", device="h100-80gb", data=8)
    assert mine.chosen_layout().num_devices == 8
    assert re.match(
        r"Each device needs [\d.]+ GiB, but a device has only [\d.]+ GiB",
        _memory_plan.memory_plan_text(mine.info),
    )
    for start in ({}, {"framework": "fsdp2"}):
        assert MemoryCalculator(**start).chosen_layout().num_devices == 1024


def test_zero_on_a_single_replica_is_said_to_shard_nothing():
    alone, sharded = (MemoryCalculator(model="gpt2", data=data, zero=3) for data in (1, 8))
    assert alone.verdict.sentence.endswith("With one data rank, ZeRO shards nothing.")
    assert "shards nothing" not in sharded.verdict.sentence


def test_every_block_tells_formula_inputs_and_source_on_hover(calculator):
    for trace in calculator.figure.traces:
        if trace["type"] == "bar":
            assert "= " in trace["hovertemplate"]
            assert "<i>" in trace["hovertemplate"]
            assert len(trace["customdata"]) == len(trace["x"])


def test_what_fits_says_how_much_is_left(calculator):
    spare = calculator.info.capacity_bytes - calculator.info.stages[0].num_bytes
    assert calculator.verdict.fits
    assert calculator.verdict.sentence == f"Fits, with {gib_text(spare)} to spare per device."


def test_what_does_not_fit_names_the_largest_block_and_a_change_that_is_enough(calculator):
    calculator.set_trait("sequence_parallel", False)
    calculator.set_trait("flash_attention", False)
    assert not calculator.verdict.fits
    assert "the largest block is activations" in calculator.verdict.sentence
    assert calculator.controls["recompute_layers"].disabled
    told = re.search(r"Full recomputation of (\d+) of 12 layers of each stage would make it fit, with (.*) per device",
                     calculator.verdict.sentence)  # fmt: skip
    count, size = int(told[1]), told[2]
    calculator.recompute = "full"
    assert calculator.verdict.fits
    assert not calculator.controls["recompute_layers"].disabled
    calculator.recompute_layers = count
    assert calculator.verdict.fits
    assert gib_text(calculator.term.value) == size
    calculator.recompute_layers = count - 1
    assert not calculator.verdict.fits
    calculator.recompute = "none"
    assert calculator.problem == ""


def test_where_no_single_change_is_enough_it_says_so():
    calculator = MemoryCalculator(model=TRILLION, data=1, tensor=1, pipeline=1, global_batch=1, zero=0)
    assert calculator.verdict.sentence.endswith("Use more tensor ranks and pipeline stages.")
    assert "No single change is enough" in calculator.verdict.sentence
    calculator.close()


def test_controls_and_traits_move_together(calculator):
    calculator.controls["zero"].value = 3
    assert calculator.zero == 3
    calculator.data = 7
    calculator.global_batch = 7 * 64
    assert calculator.controls["data"].value == 7
    assert calculator.problem == ""


def test_a_layout_that_cannot_be_is_refused_in_place_and_forgiven(calculator):
    calculator.global_batch = 1537
    assert calculator.problem.startswith("global_batch=1537 is not a multiple of data=8 x micro_batch=4")
    assert "global_batch=1537" in calculator._problem.value
    assert calculator.figure.layout.display == "none"
    assert calculator._words.value == calculator._table.value == ""
    assert not calculator.verdict.fits
    assert "global_batch=1537" in repr(calculator)
    calculator.global_batch = 1536
    assert calculator.problem == ""
    assert calculator._problem.value == ""
    assert calculator.figure.layout.display is None
    assert "<td>" in calculator._table.value


def test_an_unknown_model_is_refused_with_what_there_is(calculator):
    calculator.controls["model"].value = "gpt3-175"
    assert "did you mean" in calculator.problem or "gpt3-175b" in calculator.problem
    calculator.controls["model"].value = "gpt3-175b"
    assert calculator.problem == ""


def test_another_model_gives_the_sliders_its_own_steps(calculator):
    calculator.model = Model.transformer(layers=105, hidden=20480, heads=128, vocab=51200, seq=2048)
    assert calculator.controls["pipeline"].options == (1, 3, 5, 7, 15, 21, 35, 105)
    assert calculator.pipeline == 7
    assert calculator.problem == ""
    assert calculator.controls["expert"].disabled


def test_an_unknown_choice_is_refused():
    with pytest.raises(TypeError, match="no option 'tensors'"):
        MemoryCalculator(tensors=8)


def test_what_no_control_offers_is_refused_and_the_last_choice_stays(calculator):
    with pytest.raises(SpecError, match="device='a100' is not the full name of an entry"):
        calculator.device = "a100"
    assert calculator.device == "a100-80gb"
    calculator.controls["global_batch"].value = 0
    assert calculator.global_batch == 1
    assert "global_batch=1 is not a multiple" in calculator.problem


def test_offloading_says_what_the_host_holds(calculator):
    calculator.offload = "optimizer"
    assert "Host memory per device" in calculator._size.value


def test_words_and_table_tell_what_the_bars_show(calculator):
    info = calculator.info
    text = _memory_plan.memory_plan_text(info)
    assert text.startswith("Stage 0 of 8 uses the most memory. It needs")
    sizes = [block.num_bytes for block in table_rows(info)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == pytest.approx(info.stages[0].num_bytes)
    assert calculator._table.value.count("<tr>") == len(sizes) + 1


def test_a_key_says_what_each_symbol_of_the_formulas_means(calculator):
    key = symbols_text(calculator.info)
    assert "Ψ: parameters on a rank" in key
    assert "V: " not in key  # no formula in the table has it
    assert key in calculator._table.value


def test_a_box_is_empty_where_0_stands_for_a_default(calculator):
    seq, shard = calculator.controls["seq"], calculator.controls["shard"]
    assert [(box.value, box.placeholder) for box in (seq, shard)] == [
        ("", "the model's own"),
        ("", "all data ranks"),
    ]
    seq.value = "1024"
    assert calculator.seq == 1024
    seq.value = "many"  # refused
    assert (seq.value, calculator.seq) == ("1024", 1024)
    seq.value = ""
    assert calculator.seq == 0


def test_a_figure_alone_needs_no_widget():
    tree = memory_term(TRILLION, Layout(tensor=8, pipeline=64, global_batch=64))
    figure = figures.memory_plan(tree, capacity_bytes=80 * GIB, device="A100")
    assert len(figure.data[0].y) == 64
    assert figure.layout.shapes[1].x0 == 80


def test_a_slider_is_answered_within_milliseconds(calculator):
    """Seconds of this thread's own, so that a busy machine does not fail it."""

    def took_s(step):
        start = time.thread_time()
        calculator.tensor = (4, 8)[step % 2]
        return time.thread_time() - start

    assert any(took_s(step) < 0.040 for step in range(60))  # 10 ms is the aim; slower machines pass too
