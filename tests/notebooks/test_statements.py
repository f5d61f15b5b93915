"""What one notebook says of a quantity, every other notebook, table and figure says too.

Each row names a quantity and where it is stated: a notebook, a pattern whose group is the number, and a factor for
statements in another unit or over more ranks. A statement that has gone is a failure too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from notebooks.running import outputs, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # whoever comes first runs the notebook
N = r"([\d,]+(?:\.\d+)?)"


class Said(NamedTuple):
    notebook: str
    pattern: str
    factor: float = 1.0


ALIKE = {
    "time of a step in the tour, as predicted and in the comparison": (
        Said("01-tour", rf"step time {N} m?s(?: \([^)]*\))?, \d+ steps"),
        Said("01-tour", rf"\({N} m?s predicted\)"),
    ),
    "bytes of gpt-nano round a ring of four, predicted in one notebook and counted in another": (
        Said("01-tour", rf"ring_all_reduce {N} MB 6 [\d.]+ MB exact", 2),  # sent and received by a rank, in MB
        Said("02-architectures", rf"ring-gpt-nano: the busiest link \(rank \d\) carries {N} MB per step"),
    ),
    "bubble of 1F1B with four stages and eight micro-batches": (
        Said("02-architectures", rf"1F1B: 8 micro-batches .*? Ranks are idle for {N}% of this time"),
        Said("02-architectures", rf"The bubble would be {N}%"),
        Said("05-pipelines", rf"1f1b \d+ ms {N}%"),
        Said("05-pipelines", rf"\n1F1B: 8 micro-batches .*? Ranks are idle for {N}% of this time"),
        Said("05-pipelines", rf"Bubble: {N}%, against"),
    ),
    "bubble of GPipe": (
        Said("05-pipelines", rf"gpipe \d+ ms {N}%"),
        Said("05-pipelines", rf"GPipe: 8 micro-batches .*? Ranks are idle for {N}% of this time"),
        Said("05-pipelines", rf"against {N}% under GPipe"),
    ),
    "memory of the model with 7.5 billion parameters under ZeRO 1, printed, told and drawn": (
        Said("03-memory", rf"ZeRO 1 (?:[\d.]+ ){{5}}{N} ZeRO 2"),
        Said("03-memory", rf"Each device needs {N} GiB"),
        Said("03-memory", rf'"mode": "text", "showlegend": false, "text": \[" {N} GiB"\]'),
        Said("03-memory", rf"recompute none recompute full micro-batch 1 {N} "),
    ),
    "gradients of that model without ZeRO": (
        Said("03-memory", rf"gradients 4\.0 {N} "),
        Said("03-memory", rf"ZeRO 0 [\d.]+ {N} "),
    ),
    "ring all-reduce of 100 MB among 64 workers, in ms": (
        Said("04-communication", rf"servers 1 [\d.]+ ms {N} ms"),
        Said("04-communication", rf"workers 16 .*? 64 {N} ms"),
    ),
    "bytes of a step with int8 on two ranks, predicted and counted, in kB": (
        Said("06-compression", rf"int8 (?:[\d.]+ ms ){{4}}{N} kB"),
        Said("06-compression", rf"- int8 sends {N} kB per step"),
    ),
    "critical batch size of the MLP": (
        Said("07-large-batch", rf"critical batch size is about {N} samples"),
        Said("07-large-batch", rf"Critical batch size: {N} samples without compression"),
        Said("07-large-batch", rf"at the critical batch size of {N} samples"),
    ),
    "parameters of megatron-1t, in billions": (
        Said("03-memory", r"megatron-(\d+)b"),
        Said("09-planner", rf"{N} trillion parameters", 1e3),
    ),
    "step of the best plan for GPT-3": (
        Said("09-planner", rf"cost of a step 1 {N} s"),
        Said("09-planner", rf"Plan 1 takes {N} s per step and plan 2"),
    ),
    "bytes of a compressor written in a cell, predicted and counted": (
        Said("10-bring-your-own", rf"{N} bytes a step predicted, [\d,]+ counted\*\*;"),
        Said("10-bring-your-own", rf"bytes a step predicted, {N} counted\*\*;"),
    ),
    "bytes of a strategy written in a cell, predicted and counted": (
        Said("10-bring-your-own", rf"{N} bytes a step predicted, [\d,]+ counted\.\*\*"),
        Said("10-bring-your-own", rf"bytes a step predicted, {N} counted\.\*\*"),
    ),
}  # fmt: skip


class Value(NamedTuple):
    number: float
    half_step: float
    """Half of what the last digit stands for."""


def value(text: str, factor: float) -> Value:
    digits = text.replace(",", "")
    decimals = len(digits.partition(".")[2])
    return Value(float(digits) * factor, 0.5 * 10**-decimals * factor)


def agree(values: list[Value]) -> bool:
    """Whether one number can have been rounded to all of these."""
    low = max(one.number - 1.001 * one.half_step for one in values)
    return low <= min(one.number + 1.001 * one.half_step for one in values)


@pytest.mark.parametrize("quantity", ALIKE)
def test_a_quantity_has_one_value_wherever_it_is_stated(quantity, executed):
    values = []
    for said in ALIKE[quantity]:
        text = "\n".join(map(words, outputs(executed(said.notebook))))
        found = re.search(said.pattern, text, re.DOTALL)
        assert found, f"{said.notebook} no longer states the {quantity}: {said.pattern}"
        values.append(value(found[1], said.factor))
    assert agree(values), f"{quantity}: {[one.number for one in values]}"


def test_the_memory_calculator_says_what_the_cell_below_it_says(executed):
    text = "\n".join(map(words, outputs(executed("03-memory"))))
    widget = re.search(r"MemoryCalculator\([^:]*: ([^…]{40,})…", text)
    told = re.search(r"\*\*recompute none\*\*: ([^\n]*)", text)
    assert told[1].startswith(widget[1].strip())


@pytest.mark.parametrize(
    ("texts", "one_number"),
    [(("27.3", "27"), True), (("27.5", "27.53"), True), (("27.3", "28"), False), (("38.6", "53.1"), False)],
)
def test_rounded_numbers_agree_if_one_number_rounds_to_all(texts, one_number):
    assert agree([value(text, 1.0) for text in texts]) is one_number
