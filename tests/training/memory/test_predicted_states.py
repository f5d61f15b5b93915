"""Model states by formula against what torch's own `MemTracker` sees of a real module's training, to the byte.

Under ZeRO on 2 and 4 ranks the shards are held against their formulas in `training.strategies.test_zero_shards`.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

import shardscope as ss
from shardscope.analytic.memory import model_states
from shardscope.training.loss import cross_entropy
from shardscope.training.models import build_model
from shardscope.training.optim import build_optimizer
from shardscope.training.recompute import apply_recompute

CPU = torch.device("cpu")
MODELS = {"gpt-nano": (2, 65), "gpt-mini": (1, 65), "resnet": (2, 1, 8, 8)}


def rows_for(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = MODELS[name]
    if len(shape) == 2:
        tokens = torch.randint(256, shape)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.rand(shape), torch.randint(10, shape[:1])


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
