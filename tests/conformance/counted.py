"""Data with targets that do not count, losses that leave them out, and one process on the whole batch to hold against.

    case = CASES["classes"]
    whole = uncut(case)                                     # losses and parameters, and the evaluation of the test rows
    trained(case.job(strategy, world_size, micro_batch), context)

The whole batch is one micro-batch of plain torch; of the toolkit it takes the order of the rows alone. All in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import shardscope as ss
from shardscope.training.context import RankContext
from shardscope.training.data import GlobalSampler, load_data, read_batch
from shardscope.training.evaluate import evaluate
from shardscope.training.trainer import Trainer

ROWS, BATCH, STEPS, LR = 240, 24, 3, 0.2
SEED = 5
"""Of the data; the campaign draws others."""
WIDTH, CLASSES, TOKENS, VOCAB = 6, 4, 7, 11
BOUND = 1e-9


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def classes() -> tuple[Tensor, Tensor]:
    """Two rows of three without a target, so that some micro-batches and some ranks have none."""
    generator = _generator()
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    return x, y.masked_fill(torch.rand(ROWS, generator=generator) < 0.66, -100)


def padded() -> tuple[Tensor, Tensor]:
    """Texts of 0 to 7 tokens, padded on the right."""
    generator = _generator()
    x = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    y = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(TOKENS + 1, (ROWS, 1), generator=generator)
    return x, y.masked_fill(torch.arange(TOKENS) >= lengths, -100)


class Ragged:
    """The padded texts, each batch as long as its longest: what a data collator makes of them."""

    def __init__(self) -> None:
        self.x, self.y = padded()

    def __len__(self) -> int:
        return ROWS

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.x[rows], self.y[rows]
        longest = max(1, int((y != -100).sum(dim=1).max()))
        return x[:, :longest], y[:, :longest]


class Items(torch.utils.data.Dataset[Any]):
    """The classes one by one."""

    def __init__(self) -> None:
        self.x, self.y = classes()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


def labelled() -> dict[str, Tensor]:
    """As for Hugging Face models."""
    x, y = padded()
    return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y}


def two_columns() -> dict[str, Tensor]:
    x, y = padded()
    return {"input_ids": x, "labels": y}


def masked() -> tuple[Tensor, dict[str, Tensor]]:
    x, y = classes()
    return x, {"class": y.clamp(min=0), "mask": (y >= 0).double()}


def mlp() -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), *hidden, nn.Linear(9, CLASSES))


def tagger() -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Embedding(VOCAB, 9), *hidden, nn.Linear(9, VOCAB))


class OwnLoss(nn.Module):
    """Computes its loss itself, of the next token, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 9), nn.Linear(9, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).tanh())
        return {"loss": _next_token(logits, labels, VOCAB), "logits": logits}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": VOCAB, "n_positions": 8}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return _in_double(GPT2LMHeadModel(GPT2Config(**sizes, **still, **ends, use_cache=False)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=8, use_cache=False)
    return _in_double(_with_norms_in_double(LlamaForCausalLM(config)))


def _next_token(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """What transformers computes, which casts to fp32 first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _in_double(model: nn.Module) -> nn.Module:
    model.loss_function = _next_token
    return model


def _with_norms_in_double(model: nn.Module) -> nn.Module:
    """The model with torch's norms in place of those that transformers always computes in fp32."""
    norms = [
        (module, name, norm)
        for module in model.modules()
        for name, norm in module.named_children()
        if hasattr(norm, "variance_epsilon")
    ]
    for module, name, norm in norms:
        same = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
        same.weight = norm.weight
        setattr(module, name, same)
    return model


def _bert(head: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **still, vocab_size=VOCAB, max_position_embeddings=8, **more)
    made = getattr(transformers, head)(config)
    for parameter in (made.bert.embeddings.token_type_embeddings.weight,):
        parameter.requires_grad_(False)
    return made


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=8, d_ff=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=VOCAB, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return _with_norms_in_double(T5ForConditionalGeneration(config))


def masked_mean(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    """A user's own, which states how many targets count."""
    losses = functional.cross_entropy(output, target["class"], reduction="none")
    return (losses * target["mask"]).sum() / target["mask"].sum()


masked_mean.count = lambda target: target["mask"].sum()  # type: ignore[attr-defined]


class Positive:
    """A user's own loss as an object: the mean over classes but the first."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        kept = target > 0
        return functional.cross_entropy(output[kept], target[kept])

    def count(self, target: Tensor) -> int:
        return int((target > 0).sum())


def own_sum(output: Tensor, target: Tensor) -> Tensor:
    """A user's own sum."""
    return functional.cross_entropy(output, target, reduction="sum")


own_sum.reduction = "sum"  # type: ignore[attr-defined]
_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 0.0], dtype=torch.float64)


def named(output: Any, target: Any) -> Tensor:
    """What the named cross-entropy is, in plain torch; of a Hugging Face model its own loss."""
    if not isinstance(output, Tensor):
        return output["loss"]
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Case:
    """A job of the user's, and the loss as plain torch computes it for the whole batch."""

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    loss: Any = "cross-entropy"
    scale: float = 1.0
    """Of the learning rate."""
    bound: float = BOUND

    @property
    def plain_loss(self) -> Callable[[Any, Any], Tensor]:
        return named if self.loss == "cross-entropy" else self.loss

    @property
    def can_be_cut(self) -> bool:
        """Whether a pipeline can run it."""
        return self.model in (mlp, tagger) and self.data is not Ragged

    def job(self, strategy: Any, world_size: int, micro_batch: int | None, **changes: Any) -> ss.Job:
        fields = {
            "precision": "fp64", "steps": STEPS, "batch": ss.Batch(BATCH, micro_batch=micro_batch),
            "optimizer": ss.Optimizer("sgd", lr=LR * self.scale, momentum=0.9), "timeout_s": 60,
        }  # fmt: skip
        return ss.Job(
            model=self.model, data=self.data, loss=self.loss, strategy=strategy, world_size=world_size,
            **{**fields, **changes},
        )  # fmt: skip


CASES: dict[str, Case] = {
    "classes": Case(mlp, classes),
    "items": Case(mlp, Items),
    "padded": Case(tagger, padded),
    "ragged": Case(tagger, Ragged),
    "ignore_index": Case(mlp, classes, nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1)),
    "function": Case(mlp, classes, functional.cross_entropy),
    "weight": Case(mlp, classes, nn.CrossEntropyLoss(weight=_WEIGHTS)),
    "weight in a partial": Case(
        mlp, classes, partial(functional.cross_entropy, weight=_WEIGHTS, ignore_index=2 - 102)
    ),
    "sum": Case(mlp, classes, nn.CrossEntropyLoss(reduction="sum"), scale=0.05),
    "own sum": Case(mlp, classes, own_sum, scale=0.05),
    "states its count": Case(mlp, masked, masked_mean),
    "object": Case(mlp, classes, Positive()),
    "own loss": Case(OwnLoss, two_columns),
    "gpt2": Case(gpt2, labelled),
    "llama": Case(llama, labelled),
    "masked language model": Case(partial(_bert, "BertForMaskedLM"), labelled),
    "token classes": Case(partial(_bert, "BertForTokenClassification", num_labels=VOCAB), labelled),
    "t5": Case(t5, labelled),
}


class Trained(NamedTuple):
    """Loss of each step over the whole batch, parameters, and loss and accuracy on the test rows."""

    losses: list[float]
    parameters: dict[str, Tensor]
    test_loss: float
    accuracy: float | None


def uncut(case: Case) -> Trained:
    """Plain torch on one process, the whole batch at once."""
    torch.manual_seed(0)
    model, data = case.model().double().train(), load_data(case.data).with_validation()
    sampler = GlobalSampler(len(data.train), BATCH, seed=0)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], LR * case.scale, momentum=0.9
    )
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(case, model, read_batch(data.train, sampler.indices(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        whole = read_batch(data.test, torch.arange(len(data.test)))
        test_loss = float(_loss(case, model, whole))
        accuracy = _accuracy(model, whole)
    return Trained(losses, {name: p.detach() for name, p in model.named_parameters()}, test_loss, accuracy)


def _accuracy(model: nn.Module, batch: Any) -> float | None:
    """The share of targets that count whose class has the highest logit."""
    inputs, targets = batch
    if not isinstance(targets, Tensor):
        return None
    if not isinstance(inputs, dict):
        scores = model(inputs.double() if inputs.is_floating_point() else inputs)
    else:
        scores = model(**inputs)["logits"]
        if isinstance(model, OwnLoss) or isinstance(model.__dict__.get("_loss_function"), FunctionType):
            scores, targets = scores[:, :-1], targets[:, 1:]
    right = (scores.argmax(dim=-1) == targets)[targets != -100]
    return float(right.double().mean())


def _loss(case: Case, model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, batch)
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return case.plain_loss(output, targets)


def trained(job: ss.Job, context: RankContext) -> Any:
    """Losses, parameters and the evaluation of the test rows, of one rank."""
    return trained_by(Trainer(job, context, context.events.path.parent))


def trained_by(trainer: Trainer) -> Any:
    """The same of a trainer that has not begun."""
    job = trainer.job
    losses = [trainer.take_step(step) for step in range(1, job.steps + 1)]
    trainer.strategy.synchronize(job.steps)
    found = evaluate(
        trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place, trainer.weights.found
    )
    parameters = {name: p.detach().clone() for name, p in trainer.strategy.full_parameters().items()}
    trainer.strategy.close()
    return losses, parameters, found


def apart(results: list[Any], expected: Trained) -> dict[str, float]:
    """By how much losses, parameters and the evaluation differ from the whole batch's, relative to it."""
    found = {"losses": 0.0, "parameters": 0.0, "evaluation": 0.0}
    for step, whole in enumerate(expected.losses):
        known = [losses[step] for losses, _, _ in results if losses[step] is not None]
        mean = sum(known) / len(known)
        found["losses"] = max(found["losses"], abs(mean - whole) / (abs(whole) or 1.0))
    size = sum(float(p.square().sum()) for p in expected.parameters.values()) ** 0.5
    for _, parameters, evaluation in results:
        squares = sum(float((parameters[n] - p).square().sum()) for n, p in expected.parameters.items())
        found["parameters"] = max(found["parameters"], squares**0.5 / size)
        if math.isnan(expected.test_loss):  # no test row has a target
            found["evaluation"] = max(found["evaluation"], float(evaluation["loss"] is not None))
            continue
        of_test = abs(evaluation["loss"] - expected.test_loss) / (abs(expected.test_loss) or 1.0)
        of_accuracy = abs((evaluation["accuracy"] or 0.0) - (expected.accuracy or 0.0))
        found["evaluation"] = max(found["evaluation"], of_test, of_accuracy)
    return found
