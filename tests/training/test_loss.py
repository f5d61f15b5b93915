"""Losses: their values, their means, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardscope.errors import DataError, SpecError
from shardscope.training.loss import LOSSES, accuracy, cross_entropy, resolve_loss


def test_equal_scores_cost_the_log_of_the_classes():
    assert cross_entropy(torch.zeros(4, 10), torch.arange(4)).item() == pytest.approx(math.log(10))


def test_tokens_and_images_are_averaged_alike():
    scores, target = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    torch.testing.assert_close(
        cross_entropy(scores, target), cross_entropy(scores.reshape(15, 7), target.reshape(15))
    )


@given(parts=st.integers(1, 8), size=st.integers(1, 6), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_equal_parts_is_the_mean_of_all(name, parts, size, seed):
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(parts * size, 5, generator=generator, dtype=torch.float64)
    target = (
        torch.randint(5, (parts * size,), generator=generator) if name == "cross-entropy" else output.cos()
    )
    loss = resolve_loss(name)
    pieces = zip(output.split(size), target.split(size), strict=True)
    torch.testing.assert_close(torch.stack([loss(x, y) for x, y in pieces]).mean(), loss(output, target))


def test_accuracy_is_the_share_of_hits():
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 0.75
    assert accuracy(torch.randn(4, 1), torch.randn(4, 1)) is None


def test_a_callable_of_the_users_is_the_loss():
    loss = resolve_loss(lambda output, target: (output - target).abs().mean())
    assert loss(torch.ones(3), torch.zeros(3)).item() == 1


@pytest.mark.parametrize(
    ("loss", "output", "target", "message"),
    [
        (
            "cross-entropy",
            (4, 10),
            torch.zeros(4, 1).long(),
            r"shape \(4, 1\); give a target of shape \(4,\)",
        ),
        ("cross-entropy", (4,), torch.zeros(4).long(), r"got an output of shape \(4,\)"),
        ("cross-entropy", (4, 10), torch.zeros(4), "target of type torch.float32; give integer classes"),
        (
            "mse",
            (4, 1),
            torch.zeros(4),
            r"shape \(4, 1\) and a target of shape \(4,\); make the shapes equal",
        ),
        (
            lambda x, y: x,
            (4,),
            torch.zeros(4),
            r"returned a tensor of shape \(4,\); return a scalar tensor",
        ),
        (lambda x, y: 1.0, (4,), torch.zeros(4), "returned float; return a scalar tensor"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(loss, output, target, message):
    with pytest.raises(DataError, match=message):
        resolve_loss(loss)(torch.zeros(output), target)


def test_an_unknown_loss_is_refused():
    with pytest.raises(SpecError, match="did you mean 'cross-entropy'"):
        resolve_loss("crossentropy")


class Output(dict[str, torch.Tensor]):
    """As of Hugging Face: `loss` and `logits` as items."""


def test_the_logits_of_an_output_are_its_scores():
    scores, target = torch.randn(6, 5), torch.randint(5, (6,))
    loss = resolve_loss("cross-entropy")
    assert loss(Output(logits=scores), target) == loss(scores, target)
    assert accuracy(Output(logits=scores), target) == accuracy(scores, target)


def test_a_loss_that_the_model_has_computed_is_the_one_it_is_trained_with():
    own = torch.tensor(3.0)
    assert (
        resolve_loss("cross-entropy")(Output(loss=own, logits=torch.ones(2, 2)), torch.zeros(2).long()) is own
    )


def test_accuracy_follows_the_loss_of_the_model_itself():
    scores, target = torch.randn(4, 7, 5), torch.randint(5, (4, 7))
    target[0, :3] = -100
    aligned = Output(loss=cross_entropy(scores, target), logits=scores)
    shifted = Output(loss=cross_entropy(scores[:, :-1], target[:, 1:]), logits=scores)
    hits = scores.argmax(dim=-1) == target
    assert accuracy(aligned, target) == pytest.approx(float(hits[target >= 0].double().mean()))
    next_hits = scores[:, :-1].argmax(dim=-1) == target[:, 1:]
    assert accuracy(shifted, target) == pytest.approx(float(next_hits[target[:, 1:] >= 0].double().mean()))
    assert accuracy(Output(loss=torch.tensor(0.123), logits=scores), target) is None
    assert accuracy(Output(loss=torch.tensor(0.123), logits=scores), target + 9) is None


def test_a_named_loss_says_what_it_cannot_read():
    loss = resolve_loss("cross-entropy")
    with pytest.raises(DataError, match="the model returned a tuple without logits; return a tensor"):
        loss((torch.ones(2, 2),), torch.zeros(2).long())
    with pytest.raises(DataError, match="got a target of type dict; give targets as a tensor"):
        loss(torch.ones(2, 2), {})
