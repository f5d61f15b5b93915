"""Model states by formula against what torch's own `MemTracker` sees of a real module's training, to the byte.

Under ZeRO on 2 and 4 ranks the shards are held against their formulas in `training.strategies.test_zero_shards`.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

import shardscope as ss
from conformance.optimizers import build_optimizer
from shardscope.analytic.memory import model_states
from shardscope.training.loss import cross_entropy
from shardscope.training.models import build_model
from shardscope.training.recompute import apply_recompute

CPU = torch.device("cpu")
MODELS = {"gpt-nano": (2, 65), "gpt-mini": (1, 65), "resnet": (2, 1, 8, 8)}


def rows_for(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = MODELS[name]
    if len(shape) == 2:
        tokens = torch.randint(256, shape)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.rand(shape), torch.randint(10, shape[:1])


ONEBIT = {"onebit-adam": "adamw", "onebit-lamb": "lamb"}


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("name", MODELS)
def test_states_are_predicted_to_the_byte(name: str, optimizer: str, recompute: str) -> None:
    """LAMB's scratch is state to `MemTracker`; it is asked for by name and left out."""
    model = apply_recompute(build_model(name), recompute)  # type: ignore[arg-type]
    ours, rows = build_optimizer(ss.Optimizer(optimizer), model.named_parameters()), rows_for(name)
    tracker = MemTracker()
    tracker.track_external(model, ours, *rows)
    with tracker:
        cross_entropy(model(rows[0]), rows[1]).backward()
        ours.step()
        end = tracker.get_tracker_snapshot()[CPU]
    scratch = sum(t.untyped_storage().nbytes() for t in getattr(ours, "work_space", ()))
    tensors = list(model.parameters())
    expected = model_states(sum(p.numel() for p in tensors), optimizer=optimizer, num_tensors=len(tensors))
    seen = [end[_MemRefType.PARAM], end[_MemRefType.GRAD], end[_MemRefType.OPT] - scratch]
    assert seen == [int(term) for term in expected]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ONEBIT)
def test_what_one_bit_methods_keep_is_predicted_to_the_byte_before_and_after_the_freeze(
    method: str, name: str
) -> None:
    """Storages of the optimizer's own state, added up; frozen steps take gradients for first moments."""
    model, rows = build_model(name), rows_for(name)
    spec = ss.Optimizer(ONEBIT[method], exclude="1d")
    ours = build_optimizer(spec, model.named_parameters(), is_freezable=True)
    tensors = list(model.parameters())
    kept = ss.Compression(method).optimizer_states(spec.states)
    expected = model_states(
        sum(p.numel() for p in tensors), optimizer=kept, num_tensors=len(tensors)
    ).optimizer
    cross_entropy(model(rows[0]), rows[1]).backward()
    for step in (1, 2):
        ours.step()
        storages = [tensor.untyped_storage() for state in ours.state.values() for tensor in state.values()]
        assert len({storage.data_ptr() for storage in storages}) == len(storages)
        assert sum(storage.nbytes() for storage in storages) == expected
        if step == 1:
            ours.freeze(after=1)


def test_one_bit_lamb_keeps_a_buffer_for_updates_as_lamb_does() -> None:
    from shardscope.analytic.memory import module_memory
    from shardscope.spec.model import Model

    table, alone = Model.of("resnet-50"), ss.Optimizer("lamb").states
    lamb, onebit = (
        module_memory(table, batch=1, scores_bytes=4000, optimizer=kept)
        for kept in (alone, ss.Compression("onebit-lamb").optimizer_states(alone))
    )
    num_tensors = table.num_tensors
    assert onebit.work == lamb.work > 0
    assert onebit.optimizer - lamb.optimizer == 4 * table.num_params + 8 * num_tensors
