"""A part of what `tests/campaigns/hybrid.py` and `layout_pairs.py` run in whole: layouts against one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oracle import hybrid

pytestmark = pytest.mark.slow

LIKE = {60: 87}
"""A setting whose eight ranks take half a minute, and one of the same kind on four ranks: experts in stages of parts of
sequences, with ZeRO."""
SETTINGS = [hybrid.draw_setting(LIKE.get(number, number)) for number in range(0, hybrid.GRID, 15)]
PAIRS = [hybrid.draw_pair(number) for number in range(0, hybrid.PAIRS, 12)]


@pytest.fixture(scope="module")
def pools() -> Iterator[hybrid.Pools]:
    with hybrid.pools() as found:
        yield found


def test_layouts_train_what_one_process_trains_or_say_why_not(pools: hybrid.Pools, tmp_path: Path) -> None:
    endings = {}
    for number, case in enumerate(SETTINGS):
        (tmp_path / str(number)).mkdir()
        endings[str(case)] = hybrid.hold(case, pools, tmp_path / str(number))
    wrong = {case: ending for case, ending in endings.items() if ending.violation}
    assert not wrong
    assert sum(ending.name == "equal" for ending in endings.values()) >= 6


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_checkpoint_goes_on_under_another_layout(
    pair: hybrid.Pair, pools: hybrid.Pools, tmp_path: Path
) -> None:
    ending = hybrid.resume(pair, pools, tmp_path)
    assert ending.name == "equal", ending


def test_stages_that_share_their_states_are_resumed_without_a_pipeline(
    pools: hybrid.Pools, tmp_path: Path
) -> None:
    """Ranks of other stages hold none of a parameter's pieces, which once made each rank save its own entries."""
    before = {"data": 2, "tensor": 2, "pipeline": 2, "zero": 3, "schedule": "gpipe", "micro_batch": 4}
    after = {"data": 2, "tensor": 2, "zero": 2, "micro_batch": 6}
    drawn = [{"layout": {**each, "global_batch": hybrid.BATCH}} for each in (before, after)]
    ending = hybrid.resume(hybrid.Pair(*drawn, "adamw", 0.5), pools, tmp_path)
    assert ending.name == "equal", ending
