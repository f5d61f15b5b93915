"""Memory by kind against torch's own `MemTracker`, which sees every operation's results.

Parameters, gradients and optimizer state agree to the byte, and so do activations at the end of the forward pass, less
the loss itself: `MemTracker` counts every result of the forward pass that is alive, and there that is what autograd has
saved, and the loss. In between the definitions part: results that no operation saves (the scores, once their softmax is
there; the input of a ReLU) are activations to `MemTracker` while they live, and never to us.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils.checkpoint import set_checkpoint_early_stop

import shardscope as ss
from conformance.memory import MODELS, batch, make, step
from conformance.optimizers import build_optimizer
from shardscope.training.memory import StepMemory, held_by_default

LOSS_BYTES = 4
CPU = torch.device("cpu")


class KindPeaks(MemTracker):
    """Also keeps the peak of each kind; torch's own peak is that of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[Any, int] = {}

    def _update_snap(self, *args: Any, **kwargs: Any) -> None:
        super()._update_snap(*args, **kwargs)
        for kind, size in self._curr_mem_snap.get(CPU, {}).items():
            self.peaks[kind] = max(self.peaks.get(kind, 0), size)


class Measured:
    """The second step of a model, once measured by us and once by torch."""

    def __init__(self, name: str, recompute: str, optimizer: str = "adamw") -> None:
        self.rows, self.model = batch(name), make(name, recompute)
        self.optimizer = build_optimizer(ss.Optimizer(optimizer), self.model.named_parameters())
        step(self.model, self.optimizer, self.rows)
        self._by_us()
        self._by_torch()

    def _by_us(self) -> None:
        ours = StepMemory(lambda: held_by_default(self.model, self.optimizer), self.rows)
        after_forward: list[int] = []
        with ours.activations.active():
            step(self.model, self.optimizer, self.rows, lambda: after_forward.append(ours.activations.bytes))
        ours.sample()
        self.ours, self.after_forward = ours.peaks, after_forward[0]

    def _by_torch(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        tracker, after_forward = KindPeaks(), []
        tracker.track_external(self.model, self.optimizer, *self.rows)
        with tracker:
            step(
                self.model, self.optimizer, self.rows,
                lambda: after_forward.append(tracker.get_tracker_snapshot()[CPU][_MemRefType.ACT]),
            )  # fmt: skip
            self.end = tracker.get_tracker_snapshot()[CPU]
        self.tracker_peaks, self.tracker_after_forward = tracker.peaks, after_forward[0]


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw", "lamb", "lars"])
@pytest.mark.parametrize("name", MODELS)
def test_model_states_agree_to_the_byte(name: str, optimizer: str) -> None:
    """What an optimizer keeps to work in is state to `MemTracker` and a buffer to us."""
    measured = Measured(name, "none", optimizer)
    ours, end = measured.ours, measured.end
    assert ours["parameters"] == end[_MemRefType.PARAM] + end[_MemRefType.BUFFER]
    assert ours["gradients"] == end[_MemRefType.GRAD]
    assert ours["optimizer"] + ours["buffers"] == end[_MemRefType.OPT]
    assert (ours["buffers"] > 0) == (optimizer in ("lamb", "lars"))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_agree_at_the_end_of_the_forward_pass(name: str, recompute: str) -> None:
    measured = Measured(name, recompute)
    assert measured.after_forward + LOSS_BYTES == measured.tracker_after_forward


@pytest.mark.slow
@pytest.mark.parametrize(("name", "unsaved"), [("mlp", 0.01), ("cnn", 0.02), ("gpt-nano", 0.06)])
def test_peaks_differ_by_what_no_operation_saves(name: str, unsaved: float) -> None:
    measured = Measured(name, "none")
    ours, theirs = measured.ours["activations"], measured.tracker_peaks[_MemRefType.ACT]
    assert (1 - unsaved) * theirs <= ours < theirs
    if name == "gpt-nano":  # the scores of 8 sequences of 64 tokens, alive until their softmax is there
        assert theirs - ours == 4 * 8 * 64 * 256 + LOSS_BYTES


def test_the_peak_of_a_full_recomputation_agrees() -> None:
    """With early stop, `MemTracker` takes a block's end for missing and counts all that follows as activations."""
    with set_checkpoint_early_stop(False):
        measured = Measured("gpt-nano", "full")
    theirs = measured.tracker_peaks[_MemRefType.ACT]
    assert measured.ours["activations"] == pytest.approx(theirs, rel=1e-5)
