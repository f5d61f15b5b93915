"""Jobs that are traced in one other process get their own traces, whatever else that process prints."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss
from shardscope.prediction import traced


@pytest.mark.slow
def test_lines_of_other_code_are_not_taken_for_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a line')\nprint('and a part of one', end='')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = [
        ss.Job(model=model, data=data) for model, data in (("mlp", "digits"), ("gpt-nano", "python-source"))
    ]
    with traced.tracing_together():
        names = [traced.Traced.from_json(traced._traced_elsewhere(job.to_json())).table.name for job in jobs]
    assert names == ["mlp", "gpt-nano"]
