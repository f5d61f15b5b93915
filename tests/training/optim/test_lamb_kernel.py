"""LAMB's Triton kernel: its order of visits anywhere, its results in Triton's interpreter and on GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardscope.errors import SpecError
from shardscope.methods.optimizers.lamb import _torch
from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.methods.optimizers.lamb._visits import stages_of
from shardscope.training.compression.route import VARIABLE
from shardscope.training.optim import route
from training.optim import kernel_checks
from training.optim.problems import parameters, run, worst_difference

has_triton = importlib.util.find_spec("triton") is not None
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")


@given(num_tiles=st.lists(st.integers(1, 9), min_size=1, max_size=12), ahead=st.integers(1, 20))
def test_second_visits_follow_their_layers_first_visits_at_a_distance(num_tiles, ahead):
    (visits,) = stages_of(np.array(num_tiles), adapts=True, ahead=ahead)
    first = [(layer, tile) for layer, tile in visits.tolist() if tile >= 0]
    second = [(layer, -1 - tile) for layer, tile in visits.tolist() if tile < 0]
    assert first == [(layer, tile) for layer, count in enumerate(num_tiles) for tile in range(count)]
    assert sorted(second) == first
    for layer, count in enumerate(num_tiles):
        own = visits[:, 0] == layer
        assert visits[own, 1].tolist() == [*range(count), *range(-count, 0)]
        (begin, *_) = np.flatnonzero(own & (visits[:, 1] < 0))
        between = (visits[np.flatnonzero(own)[count - 1] : begin, 1] >= 0).sum() - 1
        assert between == min(ahead, sum(num_tiles[layer + 1 :]))


@pytest.mark.skipif(not has_triton, reason="Triton is not installed")
def test_the_kernel_passes_all_checks_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, kernel_checks.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", ["torch", None])
def test_the_kernel_is_refused_with_the_reason(variable, monkeypatch):
    if variable is None:
        monkeypatch.setattr(route.importlib.util, "find_spec", lambda name: None)
        route._fault.cache_clear()
    else:
        monkeypatch.setenv(VARIABLE, variable)
    reason = f"{VARIABLE} is 'torch'" if variable else "Triton is not installed"
    params = parameters(torch.float32)
    with pytest.raises(
        SpecError, match=rf"form='triton' is not possible, because .*{reason}; use form='auto'"
    ):
        run(TorchLamb(params, form="triton"), params, steps=1)
    route._fault.cache_clear()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", kernel_checks.CHECKS)
def test_the_kernel_passes_each_check_on_a_gpu(name):
    check, argument = kernel_checks.CHECKS[name]
    check("cuda", argument)


@pytest.mark.gpu
@on_gpu
def test_large_layers_give_the_same_bits_again_by_default():
    results = []
    for _ in range(3):
        params = kernel_checks.on_device("cuda", ((2048, 1024), (3000, 999), (50, 7)))
        optimizer = TorchLamb(params)
        results.append(kernel_checks.steps(optimizer, params, 3))
        assert optimizer._kernels is not None
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))


@pytest.mark.gpu
@on_gpu
def test_the_kernel_agrees_with_pytorch_optimizer():
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = kernel_checks.on_device("cuda"), kernel_checks.on_device("cuda")
    options = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6}
    variant = {"bias_correction": False, "clamp": 10.0, "decay_form": "decoupled", **options}
    weights = kernel_checks.steps(TorchLamb(ours, form="triton", **variant), ours, 10)
    others = kernel_checks.steps(library.Lamb(theirs, **options, adam_debias=True), theirs, 10)
    assert worst_difference(weights, others) < 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("elements", [1, 1 << 40])
def test_auto_takes_the_kernel_for_large_models_only(elements, monkeypatch):
    monkeypatch.setattr(_torch, "COMPILED_ELEMENTS", elements)
    params = kernel_checks.on_device("cuda")
    optimizer = TorchLamb(params)
    kernel_checks.steps(optimizer, params, 1)
    assert (optimizer._kernels is not None) == (elements == 1)
