"""No code outside `methods/` compares the name of a method or keys a table by it: it asks the method instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from shardscope import Compression, LRSchedule, Optimizer, Strategy
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.registry import names

TOP = Path(__file__).parents[2]
KINDS = (Compression, LRSchedule, Optimizer, PipelineSchedule, Strategy)
"""The kinds of methods."""
OTHER_WORDS = {"none", "fp16", "bf16", "fp8", "pipeline"}
"""Names of methods that also name number formats, a degree of parallelism, or that nothing was chosen."""
ALGORITHMS = {"parameter-server", "ring", "tree", "hierarchical"}
"""Strategies that have the name of the algorithm of their collective."""
EXCEPTED = {
    "toolkit/shardscope/analytic/communication/algorithms/__init__.py": ALGORITHMS,
    "toolkit/shardscope/simulator/collective.py": ALGORITHMS,
    "toolkit/shardscope/spec/optimizer.py": {"linear", "sqrt"},  # rules by which the rate is scaled
    "toolkit/shardscope/training/strategies/fully_sharded.py": {"ring"},  # a setting: whose collectives
    "toolkit/shardscope/measure/compression/loss_increase.py": {"sgd", "nesterov", "lars", "adamw", "lamb"},  # measured
    "widgets/shardscope_widgets/communication_calculator/_asked.py": ALGORITHMS,
    "widgets/shardscope_widgets/step_player/_picture.py": {"ring", "tree"},  # how ranks are arranged
    "widgets/shardscope_widgets/figures/_communication_look.py": ALGORITHMS,
    "widgets/shardscope_widgets/figures/_who_sends.py": ALGORITHMS,
    "toolkit/shardscope/tuning/population/explore.py": {"linear"},  # how an axis is drawn
    "toolkit/shardscope/prediction/observed.py": {"mesh"},  # what wraps a model that is observed
    # Settings of other programs, by our names.
    "toolkit/shardscope/planner/trainer_config/deepspeed.py": {"adamw"},
    "toolkit/shardscope/planner/trainer_config/megatron.py": {"adamw", "sgd"},
    "toolkit/shardscope/measure/calibrate/logs/layout.py": {"adamw", "sgd"},
    "toolkit/shardscope/planner/trainer_config/torchtitan.py": {
        "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"
    },
}  # fmt: skip
"""By file: words that are the names of something else there."""


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is compared, matched, or the key of a table."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            found = [node.value]
        elif isinstance(node, ast.Subscript) and not (
            isinstance(node.value, ast.Name) and node.value.id == "Literal"
        ):
            found = [node.slice]
        for each in found:
            items = each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each]
            for item in items:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield item.lineno, item.value


def test_names_are_compared_nowhere_else() -> None:
    known = {name for kind in KINDS for name in names(kind)} - OTHER_WORDS
    offences = []
    for path in sorted([*TOP.glob("toolkit/**/*.py"), *TOP.glob("widgets/**/*.py")]):
        file = str(path.relative_to(TOP))
        if file.startswith("toolkit/shardscope/methods/"):
            continue
        for line, text in compared(ast.parse(path.read_text())):
            if text in known - EXCEPTED.get(file, set()):
                offences.append(f"{file}:{line} knows {text!r} by name")
    assert not offences, "\n".join(offences)
