"""Modules traced on shapes alone: parameters, FLOP and saved bytes are those of the real thing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec.model import LayerTable, Model
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.storages import Storages
from shardscope.training.models import build_model

TOKENS = torch.zeros(2, 64, dtype=torch.int64)
IMAGES = torch.zeros(3, 1, 8, 8)


def saved_for_real(module: nn.Module, *inputs: Tensor) -> int:
    """Bytes that autograd saves in a real forward pass."""
    held = Storages()
    held.add("held", [*module.buffers(), *inputs])
    counted = Activations(held)
    with counted.active():
        output = module(*inputs)
    del output
    return counted.peak


@pytest.mark.parametrize(
    ("name", "example"),
    [("mlp", torch.zeros(4, 64)), ("cnn", IMAGES), ("resnet", IMAGES), ("gpt-nano", TOKENS)],
)
def test_parameters_and_saved_bytes_are_those_of_a_real_forward_pass(name: str, example: Tensor) -> None:
    module = build_model(name)
    table = Model.from_module(module, example, name=name)
    assert table.name == name
    assert table.num_params == sum(parameter.numel() for parameter in module.parameters())
    assert table.num_tensors == len(list(module.parameters()))
    assert table.saved_bytes * len(example) == saved_for_real(module, example)


def test_flops_are_two_for_each_multiplication() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Unflatten(1, (1, 7, 1)), nn.Conv2d(1, 4, (3, 1)))
    table = Model.from_module(module, torch.zeros(3, 5))
    assert [layer.flops for layer in table.layers] == [2 * 5 * 7, 0, 2 * 5 * 4 * 3]  # 5 places of the kernel


def test_attention_counts_both_of_its_products() -> None:
    table = Model.from_module(build_model("gpt-nano"), TOKENS)
    seq, hidden, vocab = 64, 64, 256
    block = 2 * seq * 12 * hidden**2 + 4 * seq**2 * hidden
    assert [layer.flops for layer in table.layers if layer.name.startswith("blocks")] == [block] * 4
    assert table.flops == 4 * block + 2 * seq * hidden * vocab


class Odd(nn.Module):
    """Tied weights, a layer that runs twice, one that never does, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.second = nn.Linear(4, 4, bias=False)
        self.first = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.second(self.first(self.first(left)) * self.scale + right)


def test_layers_come_in_the_order_in_which_they_run_and_shared_tensors_count_once() -> None:
    table = Model.from_module(Odd(), (torch.zeros(2, 4), torch.zeros(2, 4)))
    assert [layer.name for layer in table.layers] == ["first", "second", "unused", "(outside the layers)"]
    assert [layer.num_params for layer in table.layers] == [0, 16, 12, 4]
    assert [layer.flops for layer in table.layers] == [64, 32, 0, 0]
    assert LayerTable.from_json(table.to_json()) == table


def test_the_module_is_left_as_it_is_and_nothing_is_allocated() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(nn.Linear(1 << 17, 1 << 17), nn.ReLU())  # 64 GiB
    assert Model.from_module(huge, torch.zeros(1, 1 << 17)).num_params == (1 << 34) + (1 << 17)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    Model.from_module(module, torch.ones(4, 2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


class Loose(nn.Module):
    """Tensors that are neither parameters nor buffers, one of them left over from an earlier pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scales = [torch.ones(4)]
        closed_over = torch.ones(4)
        self.add = lambda rows: rows + closed_over
        self.last = self.layer(torch.ones(1, 4))

    def forward(self, rows: Tensor) -> Tensor:
        self.last = self.layer(rows) * self.scales[0]
        return self.add(self.last)


def test_tensors_may_lie_about_in_a_module() -> None:
    module = Loose()
    last = module.last
    table = Model.from_module(module, torch.ones(2, 4))
    assert (table.num_params, table.flops) == (20, 32)
    assert module.last is last


def test_parameters_that_a_module_also_lists_itself_count_once() -> None:
    assert Model.from_module(nn.LSTM(4, 8), torch.ones(3, 2, 4)).num_params == 4 * 8 * (4 + 8 + 2)


def test_a_tensor_that_is_given_twice_stays_one() -> None:
    rows = torch.ones(2, 5, 16)
    module = nn.MultiheadAttention(16, 4, batch_first=True)  # projects in one product where all three are one
    table = Model.from_module(module, (rows, rows, rows))
    assert table.saved_bytes * 2 == saved_for_real(module, rows, rows, rows)


class Looks(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows if float(rows.sum()) > 0 else -rows


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(SpecError, match="module of type Looks does not run on shapes alone"):
        Model.from_module(Looks(), torch.ones(1))
    with pytest.raises(SpecError, match="does not run on shapes alone: Attempted to use an uninitialized"):
        Model.from_module(nn.LazyLinear(2), torch.ones(1, 2))
    with pytest.raises(SpecError, match="module is a type; give an instance of torch.nn.Module"):
        Model.from_module(Looks, torch.ones(1))
    with pytest.raises(SpecError, match="example contains no tensor"):
        Model.from_module(nn.Linear(1, 1), (3,))
    with pytest.raises(SpecError, match="does not run on shapes alone"):
        Model.from_module(nn.Linear(4, 4), torch.zeros(1, 5))
    with pytest.raises(
        SpecError, match='shapes alone: Module .Module. is missing the required "forward" function'
    ):
        Model.from_module(nn.Module(), torch.zeros(1, 5))
