"""Blocks of README and guide run in order, as a reader would run them: a page uses only what it defines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import shardscope as ss
from conformance.runs import SHORT_TEXT
from shardscope import cli
from shardscope.measure.calibrate import calibrate as calibrate_module

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks/guide").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in PAGES
    if "```python" in page.read_text()
}
LEARNS = {"README.md", "jobs.md"}
"""The pages whose `run` is a job that learns."""
FEWER = {
    "global_batch=64, micro_batch=8": "global_batch=32, micro_batch=4",
    "ss.check(job)": "ss.check(job, steps=2)",
    "compression_speedup(slow)": "compression_speedup(slow, methods=('int8', 'topk'))", "trials=12": "trials=5",
    "run --model gpt-nano": f"run --steps 4 --data {SHORT_TEXT} --model gpt-nano", "--trials 8": "--trials 4",
    '"python-source"': repr(SHORT_TEXT), "ss.launch(slow.replace(": "ss.launch(slow.replace(steps=4, ",
    "check --strategy": "check --steps 2 --model mlp --data digits --strategy",
}  # fmt: skip
"""Samples, steps, trials and text, and what is enough to run each block and command (`--every-case`: as they are)."""
COMMANDS = dict.fromkeys(
    line.partition("#")[0].strip()
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("shardscope ")
)


@pytest.fixture(scope="module")
def shortened(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Return a function that puts less into the texts in which `FEWER` names something."""
    fewer = {} if request.config.getoption("--every-case") else FEWER
    assert all(text in TEXT for text in FEWER), "FEWER has a text that no page has any more"

    def less(text: str) -> str:
        for part, instead in fewer.items():
            text = text.replace(part, instead)
        return text

    return less


def test_every_python_block_is_valid_and_every_command_can_be_parsed() -> None:
    assert len(BLOCKS) >= 6
    for page, blocks in BLOCKS.items():
        for block in blocks:
            compile(block, page.name, "exec")
    assert len(COMMANDS) >= 12
    for command in COMMANDS:
        cli.build_parser().parse_args(shlex.split(command)[1:])


def test_the_readme_is_short_and_leads_to_every_page_of_the_guide() -> None:
    readme = PAGES[0].read_text()
    assert len(readme.splitlines()) <= 200
    assert [page.name for page in PAGES[1:] if f"(notebooks/guide/{page.name})" not in readme] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.stem)
def test_the_python_blocks_run_in_order_and_the_first_job_learns(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortened: Callable[[str], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCKS[page]:
        exec(shortened(block), names)
    if page.name in LEARNS:
        losses = names["run"].metrics().loss  # type: ignore[attr-defined]
        assert losses.iloc[-1] < 0.6 * losses.iloc[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortened: Callable[[str], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "SHARDSCOPE_CACHE", str(tmp_path / "cache")
    )  # other tests predict without a calibration
    monkeypatch.setattr(calibrate_module, "BUDGET_S", 5.0)
    ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=5)).wait()
    for command in COMMANDS:
        words = shlex.split(shortened(command))[1:]
        if words[0] == "resize":  # of a run that trains; tests/runtime/test_resize.py does it
            continue
        assert cli.main([ss.runs()[0].id if word == "RUN" else word for word in words]) == 0, command


def test_the_sample_of_a_prediction_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "notebooks/guide/planning.md").read_text()
    found = re.search(r"\nshardscope (predict .*?)\n```\n.*?```text\n(.*?)```", guide, re.DOTALL)
    assert found
    assert cli.main(shlex.split(found[1].replace("\\\n", " "))) == 0
    printed = capsys.readouterr().out.splitlines()
    number = re.compile(r"\d[\d,.]*")
    for line in filter(None, found[2].splitlines()):
        words = number.sub("0", line).split()
        (same,) = [each for each in printed if number.sub("0", each).split()[: len(words)] == words]
        shown, real = (
            [float(each.replace(",", "")) for each in number.findall(text)][: len(number.findall(line))]
            for text in (line, same)
        )
        assert shown == pytest.approx(real, rel=0.1, abs=0.1), same  # a new fit moves figures a little
