"""Trainers that own the loop and make the optimizer themselves: Lightning and Hugging Face, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own

STEPS = 4


class Digits(torch.utils.data.Dataset):
    """Sixteen rows of five numbers, with labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.arange(5.0) * (index % 7), "labels": torch.tensor(index % 3)}


class Net(nn.Module):
    """A classifier that returns its loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


Observing = Callable[[nn.Module], AbstractContextManager[Any]]


def by_hugging_face(folder: Path, observing: Observing) -> list[float]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    losses: list[float] = []

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=4,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, seed=1,
    )  # fmt: skip
    model = Net()
    trainer = Trainer(model=model, args=arguments, train_dataset=Digits())
    with observing(model):
        trainer.train()
    return losses


def by_lightning(folder: Path, observing: Observing) -> list[float]:
    lightning = pytest.importorskip("lightning")
    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    model = Module()
    with observing(model):
        trainer.fit(model, torch.utils.data.DataLoader(Digits(), batch_size=4))
    return losses


@pytest.mark.parametrize("train", [by_hugging_face, by_lightning])
def test_a_trainer_is_observed_from_outside(
    tmp_path: Path, train: Callable[[Path, Observing], list[float]]
) -> None:
    expected = train(tmp_path, lambda _: nullcontext())
    assert train(tmp_path, lambda model: ss.observe(model, root=tmp_path / "runs")) == expected
    (run,) = ss.runs(tmp_path / "runs")
    assert (run.state, run.reason) == ("completed", None)
    assert run.metrics()["loss"].tolist() == expected
    assert run.job.optimizer.label.startswith("adamw")
    assert {event["samples"] for event in run.events("step")} == {4}
    assert set(run.timeline()["name"]) >= {"forward", "backward", "optimizer"}
    (memory,) = run.events("memory")
    states = ss.predict(run.job).states
    assert [memory[kind] for kind in ("parameters", "gradients", "optimizer")] == [
        int(getattr(states, kind)[0]) for kind in ("parameters", "gradients", "optimizer")
    ]
