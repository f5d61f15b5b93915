"""PyTorch's checkpoint stops at a layer's last saved tensor, and so do predictions of software that uses it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardscope.analytic.compute import work
from shardscope.analytic.layouts import Layouts
from shardscope.calibration.calibration import Calibration
from shardscope.prediction.step import StepParts, step_time
from shardscope.prediction.step.machine import Machine
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Mixture, Transformer

MODEL = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024)
CLUSTER = Cluster.of("a100-80gb", nodes=1)
KNOWN = Calibration.of("a100-megatron").replace(half_size=0.0, launch_s=0.0, exposed_launch=0.0, shapes={})


def parts(software: str, model: Transformer = MODEL, **changes: object) -> StepParts:
    layout = Layout(data=4, tensor=2, global_batch=4, recompute="full").replace(**changes)
    return step_time(model, Layouts.of([layout]), CLUSTER, KNOWN.replace(software=software))


class Block(nn.Module):
    """A feed-forward layer with its residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def backward_flops(*, recompute: bool) -> int:
    block, x = Block(8), torch.ones(3, 8, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    return counter.get_total_flops()


def test_pytorch_does_not_repeat_the_product_after_which_a_layer_ends() -> None:
    product = 2 * 3 * 8 * 32
    assert backward_flops(recompute=True) - backward_flops(recompute=False) == product


def test_software_with_pytorchs_checkpoint_repeats_neither_the_last_product_nor_its_messages() -> None:
    whole, early = parts("megatron-core"), parts("fsdp2")
    machine = Machine.of(CLUSTER, KNOWN, "bf16-mixed")
    split = work.Split.of(tensor=2, micro_batch=1)
    last = work.feed_forward(MODEL, split, MODEL.ffn)[-1].seconds(machine.matmul_rate, 0.0)
    assert (whole.recompute - early.recompute)[0] == pytest.approx(MODEL.layers * float(last))
    assert early.compute == pytest.approx(whole.compute)
    output = MODEL.seq * MODEL.hidden * 2.0 * np.ones(1)
    message = machine.collective("all_reduce", output, 2 * np.ones(1), np.ones(1))
    hidden = 1 - KNOWN.message_overlap
    assert (whole.tensor_comm - early.tensor_comm)[0] == pytest.approx(
        MODEL.layers * hidden * float(message[0])
    )


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_nothing_else_changes(recompute: str) -> None:
    whole, early = (parts(name, recompute=recompute, tensor=1) for name in ("megatron-core", "fsdp2"))
    assert early.compute == pytest.approx(whole.compute)
    if recompute == "none":
        assert early.recompute[0] == whole.recompute[0] == 0


def test_experts_are_repeated_whole_because_their_outputs_are_saved_for_their_weights() -> None:
    mixed = MODEL.replace(mixture=Mixture(experts=8, active=2, ffn=4096))
    whole, early = (parts(name, mixed, tensor=1) for name in ("megatron-core", "fsdp2"))
    assert early.recompute == pytest.approx(whole.recompute)
