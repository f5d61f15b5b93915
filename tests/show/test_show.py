"""One renderer: sentences, tables and trees as text and as HTML."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope import show
from shardscope.analytic.terms import Term
from shardscope.measure.explain.losses import Loss
from shardscope.measure.explain.of_run import Explanation
from shardscope.runtime.record.listing import Runs
from shardscope.show import Cell, Sentences, Shown, Table, Tree, padded
from shardscope.show import html as html_of
from shardscope.show import text as text_of

WORDS = st.text(st.characters(blacklist_categories=("C", "Z", "M")), max_size=6)


def cells_of(page: str) -> list[str]:
    """Texts of the cells of a page, without headers."""
    return [html.unescape(re.sub("<[^>]*>", "", each)) for each in re.findall(r"<td[^>]*>(.*?)</td>", page)]


class TestSentences:
    def test_the_title_is_bold_and_all_is_escaped(self) -> None:
        page = Sentences(["<a>", "b & c"]).html()
        assert "<strong>&lt;a&gt;</strong>" in page
        assert "b &amp; c</p>" in page
        assert "strong" not in Sentences(["a"], is_titled=False).html()

    def test_without_sentences_nothing_is_shown(self) -> None:
        assert Sentences([]).html() == Sentences([]).text() == Sentences([""]).html() == ""

    def test_folded_sentences_are_open_in_text(self) -> None:
        said = Sentences(["a", "b"], is_titled=False, folded="Not<es>")
        assert said.text() == "a\nb"
        assert said.html().startswith("<details><summary>Not&lt;es&gt;</summary><p")


class TestTable:
    def test_numbers_are_aligned_right_and_headings_do_not_shift_them(self) -> None:
        table = Table(
            ["", "n"], ["a heading", [Cell("row", indent=1), "12"]], more="and 3 more", caption="Title"
        )
        assert table.text() == "Title\n            n\na heading\n  row      12\nand 3 more"
        page = table.html()
        assert '<th scope="rowgroup" colspan="2"' in page
        assert page.count("text-align:right") == 2

    def test_a_short_row_is_filled_up(self) -> None:
        table = Table(["a", "b", "c"], [["1"], ["1", "2", "3"]])
        assert table.text() == "a  b  c\n1\n1  2  3"
        assert padded([["x"], ["y", "z"]], num_left=2) == [["x", " "], ["y", "z"]]
        assert cells_of(table.html()) == ["1", "1", "2", "3"]

    def test_without_rows_only_the_caption_is_shown(self) -> None:
        assert Table(["a"], []).text() == Table(["a"], []).html() == ""
        empty = Table(["a"], [], caption="None ran.", more="and 0 more")
        assert empty.text() == "None ran."
        assert empty.html() == "<strong>None ran.</strong>"
        assert Table.of_frame(pd.DataFrame()).text() == ""

    def test_every_text_of_a_cell_is_escaped_but_its_mark(self) -> None:
        bad = "<b>\"&'"
        cell = Cell(bad, small=bad, about=bad, mark="<i></i>")
        page = Table([bad], [bad, [cell]], caption=bad, more=bad, has_row_heads=True).html()
        assert "<b>" not in page
        assert page.count("&lt;b&gt;&quot;&amp;&#x27;") == 7
        assert page.count("<i></i>") == 1
        assert '<th scope="row" title="' in page

    def test_classes_replace_the_look_and_rows_can_be_marked(self) -> None:
        table = Table(["a", "b", "c"], [["1", Cell("<2>", span=2)], ["1", "2", "3"]])
        page = table.html("mine", {1: ' class="chosen"'})
        assert '<table class="mine"><thead><tr><th scope="col">a</th>' in page
        assert '<tr><td>1</td><td colspan="2">&lt;2&gt;</td></tr><tr class="chosen"><td>1</td>' in page

    def test_small_print_is_in_parentheses_in_text(self) -> None:
        table = Table(["run", "loss"], [["a", Cell("1.5", "+5%")]])
        assert table.text().splitlines()[-1] == "a    1.5 (+5%)"
        assert "1.5<br><small>+5%</small>" in table.html()

    @pytest.mark.parametrize("name", ["日本語", "ｗｉｄｅ", "cafe\u0301", "3 µs", "▲ ×"])
    def test_columns_stand_below_each_other_whatever_the_width_of_signs(self, name: str) -> None:
        wide = {"日本語": 6, "ｗｉｄｅ": 8, "cafe\u0301": 4, "3 µs": 4, "▲ ×": 3}[name]
        first, second = padded([[name, "x"], ["a" * 10, "y"]], num_left=1)
        assert len(first[0]) - len(name) == 10 - wide
        assert len(second[0]) == 10

    @given(st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 5))
    def test_any_rows_keep_their_texts(self, rows: list[list[str]], num_left: int) -> None:
        table = Table((), rows, num_left=num_left)
        assert cells_of(table.html()) == [text for row in rows for text in row]
        told = padded(rows, num_left=num_left)
        assert len({len(row) for row in told}) == 1
        assert [
            [text.strip() for text in row[: len(given)]] for row, given in zip(told, rows, strict=True)
        ] == rows

    def test_columns_of_a_frame_are_formatted_by_the_end_of_their_names(self) -> None:
        frame = pd.DataFrame({"n": [1, 2], "low_s": [0.5, None], "name": ["a", None]})
        table = Table.of_frame(frame, texts={"_s": "{:.1f} s".format})
        assert table.rows == [["1", "0.5 s", "a"], ["2", "", ""]]
        assert table.text() == "n low_s name\n1 0.5 s    a\n2"


class TestTree:
    part = Term("<part>", 1.0, "s", formula="a < b", inputs={"a": 2.5e9, "b": "<x>"}, source="<source>")
    whole = Term.total("whole", (part, Term("rest", 3.0, "s")))

    def test_parts_are_indented_with_their_share(self) -> None:
        assert [line.split() for line in Tree(self.whole).text().splitlines()] == [
            ["whole", "4", "s", "100.0%"],
            ["<part>", "1", "s", "25.0%", "a", "<", "b"],
            ["rest", "3", "s", "75.0%"],
        ]

    def test_of_a_maximum_only_the_largest_part_is_told_in_text(self) -> None:
        most = Term.total("most", self.whole.parts, how="max")
        assert "<part>" not in Tree(most).text()
        assert "&lt;part&gt;" in Tree(most).html()

    def test_elements_are_nested_and_escaped(self) -> None:
        page = Tree(self.whole).html()
        assert page.count("<details") == page.count("</details>") == 3
        assert "<code>a &lt; b</code><br>a = 2.5 G, b = &lt;x&gt;<br><em>&lt;source&gt;</em>" in page
        assert not re.search("<(part|x|source)>", page)

    def test_a_unit_can_be_replaced(self) -> None:
        assert "1 GiB" in Tree(Term("memory", 2.0**30, "bytes"), unit="GiB").text()

    def test_of_nothing_there_are_no_shares(self) -> None:
        assert "%" not in Tree(Term("nothing", 0.0, "s")).text()


class _Result(Shown):
    def _shown(self) -> list[Sentences | Table | Tree]:
        return [Sentences(["Title"]), Table(["a"], [["1"]]), Table(["b"], []), Tree(Term("t", 1.0, "s"))]


def test_a_result_shows_its_parts_in_order_and_leaves_out_empty_ones() -> None:
    blocks = str(_Result()).split("\n\n")
    assert blocks[:2] == ["Title", "a\n1"]
    assert len(blocks) == 3
    assert repr(_Result()) == str(_Result()) == text_of(_Result()._shown())
    page = _Result()._repr_html_()
    assert page == html_of(_Result()._shown())
    assert page.index("Title") < page.index("flex") < page.index("<table") < page.index("<details")
    assert page.count("flex-wrap") == 1, "what follows each other stands side by side"


def test_of_the_toolkit_it_knows_only_the_units() -> None:
    assert re.findall(r"shardscope[\w.]* import", Path(show.__file__).read_text()) == [
        "shardscope.spec.units import"
    ]


def test_importing_it_loads_neither_pandas_nor_torch() -> None:
    code = "import shardscope.show, sys; print({'pandas', 'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


def test_a_column_of_texts_is_aligned_left_and_one_of_numbers_right() -> None:
    table = Table.of_frame(pd.DataFrame({"method": ["int8", "none"], "bits": [8, 32]}))
    assert table.num_left == 1
    assert table.text().splitlines()[1] == "int8      8"


def test_all_results_of_measurements_are_shown_as_tables() -> None:
    found = Explanation("Ranks wait.", "idle", 0.2, None, None, (Loss("idle", 0.2, 1),))
    assert "<td" in found._repr_html_()
    assert str(found).startswith("Ranks wait.\n\nloss of time")
    assert "No runs." in Runs()._repr_html_()
