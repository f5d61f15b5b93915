"""The tree of a population, from made-up entries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardscope.tuning.population.journal import MemberStart, Outcome, Plan
from shardscope.tuning.population.view import MemberInterval
from shardscope_widgets import figures
from shardscope_widgets.figures import _lineage
from shardscope_widgets.figures._lineage import WORST_TO_BEST

PLAN = Plan({}, {}, 3, 3, 20, ("loss", "bytes"), 0.25, 0.25, 0)


def entry(
    interval: int, member: int, parent: int | None, loss: float | None = None, **settings: Any
) -> MemberInterval:
    """One that has ended with this loss, has failed (``loss=-1``), or is under way (None)."""
    origin: Any = "drawn" if parent is None else "kept" if parent == member else "cloned"
    move = MemberStart(member, parent, None, {"optimizer.lr": 0.1, "compression": "none", **settings}, origin)
    if loss is None:
        return MemberInterval(interval, move, None)
    failed = loss < 0
    scores = None if failed else {"loss": loss, "bytes": 10.0 * member}
    return MemberInterval(
        interval, move, Outcome(interval, member, "run", scores, "it broke <b>" if failed else None)
    )


def population(*entries: MemberInterval) -> Any:
    return SimpleNamespace(plan=PLAN, entries=lambda: list(entries))


TREE = population(
    entry(1, 0, None, 2.0), entry(1, 1, None, 1.0), entry(1, 2, None, -1),
    entry(2, 0, 0, 1.5), entry(2, 1, 1, 0.5), entry(2, 2, 1, 0.25, **{"optimizer.lr": 0.12}),
    entry(3, 0, 2, None, compression={"name": "topk", "ratio": 0.1}), entry(3, 1, 1, 0.3), entry(3, 2, 2, None),
)  # fmt: skip


def test_a_parent_stands_amid_its_children_and_ends_have_rows_of_their_own() -> None:
    info = _lineage.lineage_info(TREE)
    assert [node.parent for node in info.nodes] == [None, None, None, 0, 1, 1, 5, 4, 5]
    assert [node.row for node in info.nodes] == [0, 1.75, 4, 0, 1, 2.5, 2, 1, 3]
    assert (info.rows, info.steps, info.objective) == (5, 20, "loss")


def test_no_two_lines_cross() -> None:
    info = _lineage.lineage_info(TREE)
    pairs = [(info.nodes[node.parent], node) for node in info.nodes if node.parent is not None]
    for first_parent, first in pairs:
        for second_parent, second in pairs:
            if first.interval == second.interval and first_parent.row < second_parent.row:
                assert first.row < second.row


def test_the_best_is_of_the_last_interval_that_is_over_and_its_ancestors_are_marked() -> None:
    info = _lineage.lineage_info(TREE)
    marked = [(node.interval, node.member) for node in info.nodes if node.is_ancestor]
    assert marked == [(1, 1), (2, 2)]
    by_bytes = _lineage.lineage_info(TREE, "bytes")
    assert [(n.interval, n.member) for n in by_bytes.nodes if n.is_ancestor] == [(1, 0), (2, 0)]


def test_each_dot_tells_its_settings_and_what_was_explored() -> None:
    info = _lineage.lineage_info(TREE)
    assert info.nodes[5].hover == (
        "member 2, steps 21 to 40", "loss 0.25", "bytes 20", "copied member 1, then explored:",
        "optimizer.lr 0.1 → 0.12", "compression none",
    )  # fmt: skip
    assert "compression none → topk ratio=0.1" in info.nodes[6].hover
    assert info.nodes[2].hover[1] == "it broke <b>"


def test_the_tree_is_there_in_words() -> None:
    assert _lineage.lineage_text(_lineage.lineage_info(TREE)) == (
        "3 members, 3 intervals of 20 steps. A member copied a better one 2 times. 1 interval of a member "
        "failed. The best is member 2, loss 0.25; its weights were trained by member 1 and member 2."
    )
    assert _lineage.lineage_text(_lineage.lineage_info(population())) == "No member has started."


def test_the_drawing_shows_who_took_over_and_how_good_each_was() -> None:
    figure = figures.lineage(TREE)
    traces = {trace.name: trace for trace in figure.data}
    clones = traces["copies a better member"]
    assert (clones.x[0], clones.y[0]) == (20, 1.75)
    assert (clones.x[16], clones.y[16]) == (40, 2.5)
    assert clones.x[17] is None
    scored = traces["loss at the end of the interval"]
    assert list(scored.text) == ["0", "1", "0", "1", "2", "1"]
    shares = list(scored.marker.color)
    assert shares[0] == 0.0  # the worst
    assert shares[4] == 1.0  # the best
    assert shares[1] == pytest.approx(1 / 3)  # halved once of three times
    assert scored.marker.colorscale[-1][1] == WORST_TO_BEST[-1]
    assert list(traces["failed"].text) == ["2"]
    assert "it broke &lt;b&gt;" in traces["failed"].customdata[0][0]
    assert list(traces["under way"].text) == ["0", "2"]
    assert figures.lineage(population()).data[0].x == ()
