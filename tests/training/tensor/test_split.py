"""Divided tensors, and the layers that compute with them; on one process, without a group."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardscope as ss
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model
from shardscope.training.tensor import Cut, TensorAxis, TensorSplit, recording


def split_of(size: int, rank: int, **cuts: Cut) -> TensorSplit:
    split = TensorSplit(TensorAxis(size, rank))
    split.cuts.update(cuts)
    return split


@given(dim=st.integers(0, 2), groups=st.integers(1, 3), size=st.integers(1, 4), width=st.integers(1, 3))
def test_the_parts_of_all_ranks_are_the_whole(dim: int, groups: int, size: int, width: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = groups * size * width
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    ranks = [split_of(size, rank, w=Cut(dim, groups)) for rank in range(size)]
    parts = [rank.own("w", whole) for rank in ranks]
    assert torch.equal(ranks[0].joined("w", parts), whole)
    assert {rank.shape("w", tuple(part.shape)) for rank, part in zip(ranks, parts, strict=True)} == {
        tuple(shape)
    }
    assert all(part.is_contiguous() for part in parts)


def test_each_rank_has_its_heads_of_query_key_and_value() -> None:
    rows = torch.tensor([10 * part + head for part in (1, 2, 3) for head in range(4)])
    assert split_of(2, 1, w=Cut(0, 3)).own("w", rows).tolist() == [12, 13, 22, 23, 32, 33]


def gpt(**changes: int) -> nn.Module:
    fields = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "seq": 8, "ffn": 32}
    return build_model(GPTConfig(**{**fields, **changes}))


def test_a_divided_gpt_has_its_share_of_the_weights_under_the_same_names() -> None:
    whole = gpt()
    split = TensorSplit(TensorAxis(2))
    part = split.divide(deepcopy(whole))
    own = dict(part.named_parameters())
    for name, parameter in whole.named_parameters():
        assert split.shape(name, tuple(own[name].shape)) == tuple(parameter.shape)
    divided = sum(whole.get_parameter(name).numel() for name in split.cuts)
    assert sum(p.numel() for p in own.values()) == sum(p.numel() for p in whole.parameters()) - divided // 2
    assert {*split.cuts} == {
        f"blocks.{block}.{name}"
        for block in (0, 1)
        for name in (
            "attention.qkv.weight", "attention.qkv.bias", "attention.core.project.weight", "ffn.widen.weight",
            "ffn.widen.bias", "ffn.narrow.project.weight",
        )
    }  # fmt: skip


def test_a_step_sums_four_activations_per_block_and_nothing_else() -> None:
    part = TensorSplit(TensorAxis(2)).divide(gpt().double())
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with recording() as messages:
        part(tokens).sum().backward()
    activation = 3 * 8 * 16 * 8  # samples, tokens, hidden units, bytes
    assert [message.num_bytes for message in messages] == [activation] * 8
    assert [message.phase for message in messages] == ["forward"] * 4 + ["backward"] * 4
    assert {message.op for message in messages} == {"all_reduce"}


def test_with_parts_of_sequences_every_sum_is_a_gather_and_a_scatter() -> None:
    """Korthikanti et al. 2022, section 4.2.2; and the inputs of divided columns are gathered again for gradients."""
    part = TensorSplit(TensorAxis(2), cuts_sequences=True).divide(gpt().double())
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with recording() as messages:
        logits = part(tokens)
        assert logits.shape == (3, 8, 32)
        logits.sum().backward()
    activation = 3 * 8 * 16 * 8  # samples, tokens, hidden units, bytes
    of_activations = [message for message in messages if not message.is_fixed]
    assert [message.num_bytes for message in of_activations] == [activation] * len(of_activations)
    found = Counter((message.op, message.phase) for message in of_activations)
    assert found == {
        ("all_gather", "forward"): 4 + 1,  # the last joins the whole sequences
        ("reduce_scatter", "forward"): 4,
        ("all_gather", "backward"): 4 + 4 + 1,  # the last is the gradient of the whole embeddings
        ("reduce_scatter", "backward"): 4,
    }
    sums = [message.num_bytes for message in messages if message.is_fixed]
    norms, biases = 5 * [2 * 16 * 8], 4 * [16 * 8]
    assert sorted(sums) == sorted([*norms, *biases])


def test_layers_that_work_on_parts_of_sequences_must_be_named() -> None:
    plan = ss.TensorPlan({"up": "columns"})
    with pytest.raises(
        ss.SpecError, match="sequence_parallel=True needs to know which layers .*of Named has none"
    ):
        TensorSplit(TensorAxis(2), plan, cuts_sequences=True).divide(Named())
    plan = ss.TensorPlan({"blocks": "sequence"})
    with pytest.raises(ss.SpecError, match=r"'blocks' is a ModuleList, .* use 'blocks\.\*': 'sequence'"):
        TensorSplit(TensorAxis(2), plan).divide(gpt())


class Named(nn.Module):
    """A model of one's own, with a plan given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.tied = nn.Linear(12, 6)
        self.tied.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"up": "columns", "dwn": "rows"}, r"no layer of the model is named 'dwn'.*such as 'up'"),
        ({"norm": "columns"}, r"'norm' is a LayerNorm; only linear layers"),
        (
            {"up": "columns:5"},
            r"'columns:5' does not divide the 12 .*'up'; use 'columns:N' with N one of 1, 2, 3, 6$",
        ),
        (
            {"up": "columns:4"},
            r"tensor=2 does not divide the 12 outputs in 4 parts of layer 'up'; use one of 1, 3$",
        ),
        (
            {"u*": "columns", "up": "rows"},
            r"rule 'up' has no effect, because 'u\*' matches layer 'up' before it",
        ),
        ({"down": "rows"}, r"'down' shares its weight with 'tied.weight', which needs it whole"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(rules: dict[str, str], sentence: str) -> None:
    with pytest.raises(ss.SpecError, match=sentence):
        TensorSplit(TensorAxis(2), ss.TensorPlan(rules)).divide(Named())


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(
        ss.SpecError, match="needs a plan of which layers are divided, and model=Named has none"
    ):
        TensorSplit(TensorAxis(2)).divide(Named())


def test_a_layer_with_a_forward_pass_of_its_own_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(4, 4))
    with pytest.raises(ss.SpecError, match="has a forward pass or a weight of its own class Scaled"):
        TensorSplit(TensorAxis(2), ss.TensorPlan({"0": "columns"})).divide(model)
