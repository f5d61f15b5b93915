"""The Planner's table of plans: its columns."""

from __future__ import annotations

import re

from shardscope_widgets import Planner
from shardscope_widgets.planner._screen import PlanTable


def test_a_table_of_several_frameworks_says_which_and_never_hides_it():
    made = Planner("gpt2", device="h100-80gb", nodes=1, global_batch=512)
    table = made.screen.table
    place = table.header.index("framework")
    assert [row[place] for row in table.rows] == [plan.software for plan in made.plans[: len(table.rows)]]
    assert len({row[place] for row in table.rows}) > 1
    hidden = re.findall(r"ss-column-(\w+) { display: none", PlanTable._css)
    assert {"framework", "software"}.isdisjoint(hidden)
    made.close()
