"""What is true of each schedule before any table is built: stages a rank, shape, who runs it, where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.spec.layout import SCHEDULE_NAMES
from shardscope.spec.strategy.pipeline import SHAPES, Pipeline, Shape


@dataclass(frozen=True)
class Facts:
    """One schedule."""

    name: str
    title: str
    idea: str
    source: str
    shape: Shape

    @property
    def runnable(self) -> bool:
        """Whether a job can run it here; the others are only counted."""
        return self.name in SHAPES

    def accepts(self, microbatches: int, stages: int) -> bool:
        """Whether there is a table of so many micro-batches on so many ranks."""
        return not self.runnable or Pipeline(schedule=self.name).accepts(microbatches, stages)

    def needs(self, stages: int) -> str:
        """How many micro-batches it needs, in words."""
        return Pipeline(schedule=self.name).needs(stages) if self.runnable else "at least 1"

    def stage_ranks(self, stages: int, held: int) -> tuple[int, ...]:
        """The rank that holds each stage, in the order of the stages."""
        if self.shape.v_shaped:
            return (*range(stages), *reversed(range(stages)))
        return tuple(range(stages)) * held


_COUNTED = {
    "zb-h1": Shape(1, 1, 1, splits_backward=True),
    "zb-h2": Shape(1, 1, 1, splits_backward=True),
    "v-half": Shape(2, 2, 2, v_shaped=True, splits_backward=True),
    "v-min": Shape(2, 2, 2, v_shaped=True, splits_backward=True),
}
_GPIPE = "Huang et al., GPipe, NeurIPS 2019"
_MEGATRON = "Narayanan et al., Efficient large-scale language model training on GPU clusters, SC 2021"
_ZERO_BUBBLE = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241)"
_MEMORY = "Qi et al., Pipeline parallelism with controllable memory, NeurIPS 2024 (arXiv 2405.15362)"
_TOLD = {
    "gpipe": ("GPipe", "All forwards, then all backwards.", _GPIPE),
    "1f1b": (
        "1F1B",
        "A backward as soon as there is one, so that a rank holds no more than what is ahead of it.",
        "Narayanan et al., Memory-efficient pipeline-parallel DNN training, ICML 2021",
    ),
    "interleaved": (
        "Interleaved 1F1B",
        "Several short stages a rank: the pipeline fills sooner, for more sends and more memory.",
        _MEGATRON,
    ),
    "zero-bubble": (
        "Interleaved zero bubble",
        "Interleaved, with the weights' gradients put off into what would be bubble at the end.",
        _ZERO_BUBBLE,
    ),
    "zb-h1": (
        "ZB-H1",
        "1F1B with the weights' gradients put off into the bubble, in the same memory.",
        _ZERO_BUBBLE,
    ),
    "zb-h2": (
        "ZB-H2",
        "Nearly twice the forwards ahead, so that no rank waits for the first gradient.",
        _ZERO_BUBBLE,
    ),
    "zbv": (
        "ZB-V",
        "Two stages a rank, down the ranks and back up: no bubble, in the memory of 1F1B.",
        _ZERO_BUBBLE,
    ),
    "v-half": (
        "V-Half",
        "The V with forwards at half the pace: half the memory of 1F1B, half its bubble.",
        _MEMORY,
    ),
    "v-min": (
        "V-Min",
        "The V with the shortest life of a micro-batch: a third of the memory of 1F1B, two thirds of its bubble.",
        _MEMORY,
    ),
    "dualpipev": (
        "DualPipeV",
        "The V where a forward and a backward run as a pair, so that one's communication hides behind the other.",
        "DeepSeek-AI, DeepSeek-V3 technical report, 2024, section 3.2.1, cut in half to a V",
    ),
}

FACTS: dict[str, Facts] = {
    name: Facts(name, *_TOLD[name], SHAPES[name] if name in SHAPES else _COUNTED[name])
    for name in SCHEDULE_NAMES
}
"""Of every schedule, in the order of `SCHEDULE_NAMES`."""
