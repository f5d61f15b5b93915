"""The report's page and the demo's table."""

from __future__ import annotations

import base64
import gzip
import json
import re
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs_version

from shardscope.spec.strategy import strategies
from shardscope_widgets import demo, write_report
from shardscope_widgets.figures._comparison import comparison_info
from shardscope_widgets.report._page import Page
from shardscope_widgets.trace import Trace
from widgets.fake_runs import consensus_events, fake_run, memory_events, schedule_events, update_events

BUNDLE = gzip.decompress(files("shardscope_widgets.report").joinpath("plotly-basic.min.js.gz").read_bytes())


def figures_in(page: str) -> list[dict]:
    (packed,) = re.findall(r'id="figures">([^<]+)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_report_stands_alone_and_escapes_what_users_wrote(tmp_path: Path) -> None:
    runs = [fake_run("single", 1, steps=9), fake_run("ring", 2, steps=9, run_id="<img src=x>")]
    page = write_report(runs, tmp_path / "report.html", title="<b>Mine</b>").read_text()
    assert len(figures_in(page)) >= 5
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", page)
    assert "<img src=x>" not in page
    assert "&lt;b&gt;Mine&lt;/b&gt;" in page


def test_the_library_is_embedded_once_and_keeps_the_page_small(tmp_path: Path) -> None:
    page = write_report([fake_run("ring", 2, steps=60)], tmp_path / "report.html").read_text()
    (packed,) = re.findall(r'id="plotly">([^<]+)</script>', page)
    assert gzip.decompress(base64.b64decode(packed)) == BUNDLE
    assert len(page) < 700_000


def test_the_bundle_is_free_to_ship_and_of_the_version_that_python_writes_figures_for() -> None:
    head = BUNDLE[:400].decode()
    assert "Licensed under the MIT license" in head
    assert f"plotly.js (basic - minified) v{get_plotlyjs_version()}" in head


def test_a_figure_that_the_bundle_cannot_draw_is_refused() -> None:
    with pytest.raises(AssertionError, match="heatmap"):
        Page().figure(go.Figure(go.Heatmap(z=[[1]])), "")


def test_every_section_has_a_permalink_and_the_contents_lead_to_them(tmp_path: Path) -> None:
    page = write_report([fake_run("single"), fake_run("ring", 2)], tmp_path / "report.html").read_text()
    anchors = re.findall(r'<h[23] id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors)) > 5
    assert set(re.findall(r'href="#([^"]+)"', page)) == set(anchors)
    assert '<nav aria-label="Contents"><ul><li><a href="#gpt-nano-on-python-source">' in page


def test_each_strategy_is_shown_step_by_step_once(tmp_path: Path) -> None:
    one, run, again = (fake_run(kind, ranks, steps=9, run_id=f"{kind} {n}") for n, (kind, ranks) in
                       enumerate([("single", 1), ("ring", 2), ("ring", 2)]))  # fmt: skip
    run.all_events += [*schedule_events(2, 4), *update_events([[0]]), *consensus_events([0.1])]
    page = write_report([one, run, again], tmp_path / "report.html").read_text()
    section = page[page.index('<h2 id="step-by-step">') : page.index('<h2 id="settings-and-machine">')]
    assert section.count("<details>") == 2
    for words in ("gaps are the bubble", "The staleness of a gradient", "differ from their mean by at most"):
        assert section.count(words) == 1


def test_memory_is_one_bar_a_run_for_its_fullest_rank(tmp_path: Path) -> None:
    one, run = fake_run("single", steps=9), fake_run("ring", 2, steps=9)
    one.all_events += memory_events(1)
    run.all_events += memory_events(2, shards=2)
    found = figures_in(write_report([one, run], tmp_path / "report.html").read_text())
    (stacks,) = [each for each in found if any(bar.get("name") == "optimizer state" for bar in each["data"])]
    assert stacks["layout"]["yaxis"]["ticktext"] == ["ring ", "single "]
    (totals,) = [trace["text"] for trace in stacks["data"] if trace.get("mode") == "text"]
    assert totals == [" 3.01 MB", " 3.6 MB"]


def test_runs_without_a_step_are_named_and_left_out(tmp_path: Path) -> None:
    early = fake_run("ring", 2, steps=1, run_id="early")
    early.all_events = [event for event in early.all_events if event["event"] != "step"]
    page = write_report([early], tmp_path / "report.html").read_text()
    assert "Left out because no step has finished: early" in page


def test_the_demo_has_every_strategy_on_every_workload() -> None:
    jobs = demo.jobs()
    assert {(job.model, job.strategy.name) for job in jobs} == {
        (workload[0], kind) for workload in demo.WORKLOADS for kind in strategies()
    }
    assert {job.world_size for job in jobs if job.strategy.name != "single"} == {4}


def test_the_table_is_aligned() -> None:
    rows = comparison_info([Trace.read(fake_run(kind, 2, steps=9)) for kind in ("single", "ring")])
    lines = demo.table_text(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("run ")


def test_the_bar_says_where_it_is() -> None:
    trace = Trace.read(fake_run("ring", 2, steps=30))
    line = demo.bar_line("gpt-nano, ring", trace, 60)
    assert "30/60" in line
    assert line.count("━") == line.count("╌")
