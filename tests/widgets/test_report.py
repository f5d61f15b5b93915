"""The report and the demo's table."""

from __future__ import annotations

import re

from shardscope.spec.strategy import strategies
from shardscope_widgets import demo, write_report
from shardscope_widgets.figures import comparison_info
from shardscope_widgets.trace import Trace
from widgets.fake_runs import consensus_events, fake_run, memory_events, schedule_events, update_events


def test_the_report_stands_alone_and_escapes_what_users_wrote(tmp_path):
    runs = [fake_run("single", 1, steps=9), fake_run("ring", 2, steps=9, chunks=True, run_id="<img src=x>")]
    page = write_report(runs, tmp_path / "report.html", title="<b>Mine</b>").read_text()
    assert page.count("Plotly.newPlot(") >= 5
    assert len(re.findall(r"<script[^>]+src=", page)) == 0
    assert "<img src=x>" not in page.replace("\\u003cimg src=x\\u003e", "")
    assert "&lt;b&gt;Mine&lt;/b&gt;" in page
    assert page.count("plotly.js v") == 1, "the library is embedded once"


def test_what_an_architecture_adds_is_in_the_report(tmp_path):
    one, run = fake_run("single", steps=9), fake_run("ring", 2, steps=9)
    one.all_events += memory_events(1)
    run.all_events += [
        *memory_events(2),
        *schedule_events(2, 4),
        *update_events([[0]]),
        *consensus_events([0.1]),
    ]
    page = write_report([one, run], tmp_path / "report.html").read_text()
    for heading in ("Memory by kind", "Consensus", "Schedule of ring", "Staleness of ring"):
        assert heading in page
    assert "one process: 3.6 MB" in page


def test_runs_without_a_step_are_named_and_left_out(tmp_path):
    page = write_report(
        [fake_run("ring", 2, steps=0, run_id="too-early")], tmp_path / "report.html"
    ).read_text()
    assert "Left out because no step has finished: too-early" in page


def test_the_demo_has_every_strategy_on_every_workload():
    jobs = demo.jobs()
    assert {(job.model, job.strategy.name) for job in jobs} == {
        (workload[0], kind) for workload in demo.WORKLOADS for kind in strategies()
    }
    assert {job.world_size for job in jobs if job.strategy.name != "single"} == {4}


def test_the_table_is_aligned():
    rows = comparison_info([Trace.read(fake_run(kind, 2, steps=9)) for kind in ("single", "ring")])
    lines = demo.table_text(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("run ")


def test_the_bar_says_where_it_is():
    trace = Trace.read(fake_run("ring", 2, steps=30))
    line = demo.bar_line("gpt-nano, ring", trace, 60)
    assert "30/60" in line
    assert line.count("━") == line.count("╌")
