"""Models with experts: routing, drops and balance loss are those of a plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardscope.errors import SpecError
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.loss import resolve_loss
from shardscope.training.models import build_model
from shardscope.training.models.mixture import Experts
from shardscope.training.target_counts import IGNORED

MIXTURES = {
    "two choices": RoutedMixture(experts=4, active=2, ffn=8),
    "one choice, with drops": RoutedMixture(experts=4, active=1, ffn=8, capacity_factor=0.75),
    "three choices, with drops": RoutedMixture(experts=6, active=3, ffn=8, capacity_factor=0.5),
    "shared experts": RoutedMixture(experts=4, active=2, ffn=8, shared_ffn=6, router_bias=True),
}


def layer(mixture: RoutedMixture, *, skew: float = 2.0) -> Experts:
    torch.manual_seed(3)
    experts = Experts(12, mixture).double()
    with torch.no_grad():
        experts.router.weight.mul_(skew)
    return experts


def one_expert(experts: Experts, number: int, x: Tensor) -> Tensor:
    first, second = experts.widen, experts.narrow.project
    inner = functional.gelu(first.weight[number] @ x + first.bias[number], approximate="tanh")
    return second.weight[number] @ inner + second.bias[number]


def plainly(
    experts: Experts, sequence: Tensor, probabilities: Tensor
) -> tuple[Tensor, Tensor, list[list[bool]]]:
    """Output, fractions of choices and kept choices of one sequence `(T, hidden)`, a token and a choice at a time."""
    mixture = experts.router.mixture
    choices = [
        sorted(range(mixture.experts), key=lambda expert: -float(row[expert]))[: mixture.active]
        for row in probabilities.detach()
    ]
    room = [mixture.capacity(len(sequence)) or math.inf] * mixture.experts
    kept = [[False] * mixture.active for _ in sequence]
    for choice in range(mixture.active):
        for token in range(len(sequence)):
            expert = choices[token][choice]
            if room[expert] > 0:
                room[expert] -= 1
                kept[token][choice] = True
    rows = []
    for token, x in enumerate(sequence):
        own = [probabilities[token, expert] for expert in choices[token]]
        total = sum(own) if mixture.active > 1 else 1.0
        terms = [
            one_expert(experts, expert, x) * (weight / total)
            for expert, weight, is_kept in zip(choices[token], own, kept[token], strict=True)
            if is_kept
        ]
        rows.append(sum(terms, torch.zeros_like(x)))
    out = torch.stack(rows)
    if experts.shared is not None:
        out = out + experts.shared(sequence)
    counts = [sum(expert in row for row in choices) for expert in range(mixture.experts)]
    return out, torch.tensor(counts, dtype=torch.float64) / (len(sequence) * mixture.active), kept


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_a_layer_computes_what_a_plain_loop_over_tokens_does(mixture: RoutedMixture) -> None:
    experts, x = layer(mixture), torch.randn(3, 10, 12, dtype=torch.float64, requires_grad=True)
    out, balance = experts(x)
    routes = experts.router(x)
    probabilities = functional.linear(x, experts.router.weight, experts.router.bias).softmax(-1)
    plain = [plainly(experts, *each) for each in zip(x, probabilities, strict=True)]
    fractions = torch.stack([each for _, each, _ in plain])
    expected = mixture.experts * (fractions * probabilities.mean(1)).sum(-1)
    kept = torch.tensor([each for _, _, each in plain])
    assert torch.equal(torch.ones_like(kept) if routes.is_kept is None else routes.is_kept, kept)
    assert kept.all() == (mixture.capacity_factor is None)
    assert torch.equal(balance, expected)  # to the bit
    torch.testing.assert_close(out, torch.stack([each for each, _, _ in plain]), rtol=1e-12, atol=1e-14)
    ours = torch.autograd.grad((out.square().sum() + balance.sum()), [x, *experts.parameters()])
    value = sum(out.square().sum() for out, _, _ in plain) + expected.sum()
    theirs = torch.autograd.grad(value, [x, *experts.parameters()], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_a_sequence_is_routed_alike_alone_and_in_a_batch(mixture: RoutedMixture) -> None:
    experts, x = layer(mixture), torch.randn(4, 10, 12, dtype=torch.float64)
    out, balance = experts(x)
    for number in range(4):
        alone = experts(x[number : number + 1])
        torch.testing.assert_close(alone, (out[number : number + 1], balance[number : number + 1]))


def test_an_even_load_has_a_balance_loss_of_one_and_one_expert_for_all_of_their_number() -> None:
    experts = layer(RoutedMixture(experts=4, active=1, ffn=8))
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[0] = 100.0
    x = torch.ones(1, 8, 12, dtype=torch.float64)
    assert experts(x)[1].item() == pytest.approx(4.0)
    with torch.no_grad():
        experts.router.weight.copy_(300 * torch.eye(4, 12))
    even = torch.eye(4, 12, dtype=torch.float64).repeat(2, 1)[None]
    assert experts(even)[1].item() == pytest.approx(1.0)


def tiny(**fields: object) -> nn.Module:
    mixture = RoutedMixture(**{"experts": 4, "active": 2, "ffn": 8, **fields})  # type: ignore[arg-type]
    return build_model(GPTConfig(layers=3, hidden=12, heads=3, vocab=17, seq=5, mixture=mixture))


def test_training_adds_the_balance_loss_and_an_evaluation_does_not() -> None:
    model, tokens = tiny(dense_layers=1, balance=0.5), torch.randint(17, (4, 5))
    loss, output = resolve_loss("cross-entropy"), model(tokens)
    scores = model.eval()(tokens)
    assert torch.equal(output["logits"], scores)
    assert loss(output, tokens).item() == pytest.approx(
        loss(scores, tokens).item() + output["balance_loss"].mean().item(), rel=1e-6
    )
    assert 0.5 * 2 * 0.9 < output["balance_loss"].mean().item() < 0.5 * 2 * 4  # two layers have experts
    assert isinstance(tiny(balance=0.0)(tokens), Tensor)


def test_a_balance_loss_has_the_weight_of_the_targets_however_a_batch_is_split() -> None:
    model, tokens, loss = tiny(balance=0.5), torch.randint(17, (4, 5)), resolve_loss("cross-entropy")
    targets = tokens.clone()
    targets[0, 1:], targets[2, 2:] = IGNORED, IGNORED
    counts = [float((half != IGNORED).sum()) for half in targets.split(2)]
    halves = [loss(model(x), y) for x, y in zip(tokens.split(2), targets.split(2), strict=True)]
    mean = sum(count * half.item() for count, half in zip(counts, halves, strict=True)) / sum(counts)
    assert mean == pytest.approx(loss(model(tokens), targets).item(), rel=1e-6)


def test_every_expert_has_a_gradient_even_without_tokens() -> None:
    model, tokens = tiny(active=1), torch.zeros(1, 1, dtype=torch.int64)
    resolve_loss("cross-entropy")(model(tokens), tokens).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not [name for name, gradient in gradients.items() if gradient is None]


def test_a_router_computes_in_full_precision_under_autocast() -> None:
    experts, x = layer(MIXTURES["two choices"]).float(), torch.randn(2, 5, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(experts.router(x).balance, experts.router(x).balance.float())
        assert experts.router(x).weights.dtype == torch.float32


def test_a_mixture_in_every_layer_or_a_gate_is_refused_by_its_field() -> None:
    with pytest.raises(SpecError, match="mixture.dense_layers=3 leaves no layer with experts in layers=3"):
        tiny(dense_layers=3)
    with pytest.raises(SpecError, match=r"mixture.shared_gate=True is not available"):
        tiny(shared_gate=True)
