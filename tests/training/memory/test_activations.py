"""What autograd saves is counted from when it saves it to when it lets go, and counting changes nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.memory import MODELS, batch, make
from shardscope.training.loss import cross_entropy
from shardscope.training.memory import Activations, Storages, counting

MODES = ["none", "selective", "full"]


def counter(*held: Tensor) -> Activations:
    known = Storages()
    known.add("inputs", held)
    return Activations(known)


def gradients(model: nn.Module, rows: tuple[Tensor, Tensor]) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    cross_entropy(model(rows[0]), rows[1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_counting_changes_no_gradient(name: str, mode: str) -> None:
    model, rows = make(name, mode), batch(name)
    plain = gradients(model, rows)
    with counter().active():
        counted = gradients(model, rows)
    assert all(torch.equal(plain[key], counted[key]) for key in plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_the_backward_pass(name: str, mode: str) -> None:
    model, rows, activations = make(name, mode), batch(name), counter()
    gc.disable()
    try:
        with activations.active():
            gradients(model, rows)
            assert activations.peak > 0
            assert activations.bytes == 0  # at once, without the garbage collector
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_dropped_is_let_go_at_once(mode: str) -> None:
    model, (images, _), activations = make("mlp", mode), batch("mlp"), counter()
    gc.disable()
    try:
        with activations.active():
            output = model(images)
            assert activations.bytes > 0
            del output
            assert activations.bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_lowers_the_peak(name: str) -> None:
    peaks = {}
    for mode in MODES:
        model, rows = make(name, mode), batch(name)
        activations = counter(*rows)
        with activations.active():
            gradients(model, rows)
        peaks[mode] = activations.peak
    assert peaks["full"] <= peaks["selective"] < 0.75 * peaks["none"]


@pytest.mark.slow
def test_a_full_recomputation_holds_the_inputs_of_all_blocks_and_the_inside_of_one() -> None:
    model, rows = make("gpt-nano", "full"), batch("gpt-nano")
    activations = counter(*rows)
    with activations.active():
        loss = cross_entropy(model(rows[0]), rows[1])
        after_forward = activations.bytes
        stream = 4 * 8 * 64 * model.config.hidden  # type: ignore[union-attr, operator]
        assert after_forward >= (model.config.layers + 1) * stream  # type: ignore[union-attr, operator]
        loss.backward()
    inside_of_one = activations.peak - after_forward
    whole = counter(*rows)
    with whole.active():
        gradients(make("gpt-nano"), rows)
    assert stream < inside_of_one < whole.peak / model.config.layers  # type: ignore[union-attr, operator]


def test_micro_batches_in_flight_add_up() -> None:
    model, (images, _), activations = make("mlp"), batch("mlp"), counter()
    with activations.active():
        outputs = [model(images).sum() for _ in range(3)]
        in_flight = [activations.bytes]
        for output in outputs:
            output.backward()
            in_flight.append(activations.bytes)
    one = in_flight[2]
    # the micro-batches share their input: it is let go with the last of them
    shared = images.untyped_storage().nbytes()
    assert in_flight == [3 * (one - shared) + shared, 2 * (one - shared) + shared, one, 0]


def test_parameters_and_inputs_are_not_activations() -> None:
    layer, rows = nn.Linear(64, 32), torch.rand(8, 64)
    activations = counter(rows)
    with activations.active():
        layer(rows).sum()
    assert activations.peak == 0


def test_an_input_nobody_else_holds_is_an_activation() -> None:
    layer, activations = nn.Linear(64, 32), counter()
    with activations.active():
        layer(torch.rand(8, 64)).sum()
    assert activations.peak == 8 * 64 * 4


def test_a_storage_saved_twice_counts_once_and_whole() -> None:
    activations = counter()
    base = torch.rand(10, 10)
    weight = torch.ones((), requires_grad=True)
    with activations.active():
        first, second = base[0] * weight, base[1] * weight
        assert activations.bytes == 400
        del first
        assert activations.bytes == 400
        del second
    assert activations.bytes == 0


def test_weights_cast_by_autocast_count() -> None:
    layer, rows = nn.Linear(64, 32, bias=False), torch.rand(8, 64, requires_grad=True)
    activations = counter(rows)
    with activations.active(), torch.autocast("cpu", torch.bfloat16):
        output = layer(rows)
        held = activations.bytes
    assert held == 2 * (8 * 64 + 64 * 32)
    del output


def test_only_counts_while_active() -> None:
    activations = counter()
    assert counting() is None
    with activations.active():
        assert counting() is activations
    assert counting() is None
    make("mlp")(batch("mlp")[0]).sum().backward()
    assert activations.peak == 0
