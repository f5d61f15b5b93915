"""What checkpoints cost training, and how many bytes incremental ones write.

    python tests/benchmarks/checkpoints.py [rounds] [ranks]

The same job runs without checkpoints, with checkpoints that it waits for, and with checkpoints written in the
background, interleaved. Computation is emulated by sleeping, so a busy machine disturbs little. The cost is the extra
time of a step, on average over all steps between the first and the last checkpoint.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.alone import trainer_in

STEPS, EVERY, COMPUTE_S = 41, 10, 0.1
WIDTH, LAYERS = 512, 12
MODES = {
    "none": ss.Checkpoint(),
    "synchronous": ss.Checkpoint(every=EVERY),
    "asynchronous": ss.Checkpoint(every=EVERY, asynchronous=True),
}


def make_model() -> nn.Module:
    """A stack of linear layers, 3.1 million parameters, that also sleeps in its forward pass."""

    class Slow(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            time.sleep(COMPUTE_S)
            return super().forward(images)

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return Slow(nn.Flatten(), nn.Linear(64, WIDTH), *layers, nn.Linear(WIDTH, 10))


def step_s(checkpoint: ss.Checkpoint, ranks: int, root: str) -> tuple[float, list[dict[str, Any]]]:
    """Mean time of a step of one run, and rank 0's checkpoints."""
    job = ss.Job(
        model=make_model, data="digits", strategy="ring", world_size=ranks, batch=2 * ranks, steps=STEPS,
        checkpoint=checkpoint, record=ss.Record(memory_first=0, memory_every=None, messages_first=0),
    )  # fmt: skip
    run = ss.launch(job, root=root).wait(300)
    ends = {event["step"]: event["t"] for event in run.events("step", rank=0)}
    return (ends[STEPS] - ends[EVERY - 1]) / (STEPS - EVERY + 1), run.events("checkpoint", rank=0)


def cost_of_saving(rounds: int, ranks: int) -> None:
    """Print what a step takes in each mode."""
    found: dict[str, list[float]] = {name: [] for name in MODES}
    blocked: dict[str, list[float]] = {name: [] for name in MODES}
    whole: dict[str, list[float]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(rounds):
            for name, checkpoint in MODES.items():
                seconds, saved = step_s(checkpoint, ranks, root)
                found[name].append(seconds)
                blocked[name] += [event["blocked_s"] for event in saved]
                whole[name] += [event["seconds"] for event in saved]
    print(f"{ranks} ranks, a checkpoint every {EVERY} steps, {rounds} rounds")
    for name, times in found.items():
        extra = [t / plain - 1 for t, plain in zip(times, found["none"], strict=True)]
        save = ""
        if whole[name]:
            delay = statistics.median(blocked[name])
            save = (
                f"; a save delays training by {1e3 * delay:.1f} ms, {delay / EVERY / statistics.median(times):.1%} of "
                f"its steps, and is complete after {1e3 * statistics.median(whole[name]):.1f} ms"
            )
        print(
            f"{name:13} {1e3 * statistics.median(times):7.1f} ms a step, {statistics.median(extra):+.1%}{save}"
        )


def half_frozen(layers: int = 4) -> nn.Module:
    """A stack whose first half is not trained."""
    model = nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64) for _ in range(layers)])
    for layer in list(model)[1 : 1 + layers // 2]:
        layer.requires_grad_(False)
    return model


def bytes_a_save(
    optimizer: str, *, incremental: bool, model: Callable[[], nn.Module], freeze_at: int = 0
) -> int:
    """Bytes of the last of six saves, after every step; from `freeze_at` on, half of the layers are frozen."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ss.Checkpoint(every=1, incremental=incremental)
        trainer = trainer_in(Path(folder), model=model, optimizer=optimizer, steps=6, checkpoint=checkpoint)
        emitted: list[int] = []
        emit = trainer.context.events.emit

        def noted(event: str, **fields: Any) -> None:
            emitted.extend([fields["bytes"]] if event == "checkpoint" else [])
            emit(event, **fields)

        trainer.context.events.emit = noted  # type: ignore[method-assign]
        for step in range(1, 7):
            if step == freeze_at:
                for layer in list(trainer.model)[1:3]:  # type: ignore[call-overload]
                    layer.requires_grad_(False)
            trainer.take_step(step)
            trainer._after_step(step, 0.0, None)
        return emitted[-1]


def bytes_of_saving() -> None:
    """Print the bytes that a save writes where half of the parameters are frozen."""
    print("\nbytes written by a save, half of the parameters frozen")
    for optimizer in ("sgd", "adamw"):
        for name, model, freeze_at in (
            ("from the start", half_frozen, 0),
            ("from step 3 on", lambda: half_frozen().requires_grad_(True), 3),
        ):
            whole, part = (
                bytes_a_save(optimizer, incremental=incremental, model=model, freeze_at=freeze_at)
                for incremental in (False, True)
            )
            print(f"{optimizer:6} {name}: {whole:9,} whole, {part:9,} incremental, {part / whole:.1%}")


if __name__ == "__main__":
    cost_of_saving(int(sys.argv[1]) if len(sys.argv) > 1 else 3, int(sys.argv[2]) if len(sys.argv) > 2 else 2)
    bytes_of_saving()
