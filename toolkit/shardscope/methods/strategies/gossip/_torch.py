"""Decentralised averaging: every rank trains its own model, and averages it with its neighbours' models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.methods.strategies import gossip
from shardscope.methods.strategies.gossip._torch_choco import PublicCopies
from shardscope.training.collectives.neighbours import Neighbours
from shardscope.training.collectives.packets import Packets
from shardscope.training.compression import Carrier
from shardscope.training.flat import copy_tensors_, views_of
from shardscope.training.memory import Held
from shardscope.training.observe import StandIns
from shardscope.training.optim.holding import SavedCheckpoint
from shardscope.training.sharding import start_alike
from shardscope.training.strategies.base import LossFunction, MicroBatch, RankStrategy
from shardscope.training.strategies.step_result import StepResult

_PUBLIC = "public."
_NUM_RANKS = "num_ranks"


class GossipRank(RankStrategy):
    """D-PSGD (Lian et al. 2017): a local step, then averaging with the two neighbours on a ring.

    With compression, this is CHOCO-SGD, which `PublicCopies` implements.

    Gradient norm, clipping, loss scale, the ratios of LAMB and LARS, and running means such as those of batch norm are
    local to each rank. The model that is evaluated, and that `full_parameters` returns, is the mean over all ranks,
    with the running means of rank 0.
    """

    shares_state: ClassVar[bool] = False
    settings: gossip.Gossip

    def wrap(self, model: nn.Module) -> nn.Module:
        assert self.context.group is not None
        self.group = self.context.group
        trained = [p for p in model.parameters() if p.requires_grad]
        formats = sorted({str(p.dtype) for p in trained})
        if len(formats) > 1:
            raise SpecError(f"the model's parameters are {', '.join(formats)}; gossip needs a single dtype")
        start_alike(model)
        is_staged = self.context.is_staged(sum(p.nbytes for p in trained))
        device = torch.device("cpu") if is_staged else self.context.device
        self.neighbours = Neighbours(self.group, int(self.settings.slice_mb * 2**20), device)
        self._flat = torch.empty(sum(p.numel() for p in trained), dtype=trained[0].dtype, device=device)
        self.public = self._public_copies(model)
        return model

    def _public_copies(self, model: nn.Module) -> PublicCopies | None:
        if self.compressor is None:
            return None
        self.compressor.forget()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        copy_tensors_(views_of(self._flat, [p for _, p in named]), [p for _, p in named])
        add_up = partial(self.group.sum_as, "packet_sum")
        self.carrier = Carrier(add_up, Packets(self.group), self.context.meter, self.job.seed)
        return PublicCopies(
            self.neighbours, self.compressor, self.carrier, self.settings.step_size(self.job.compression),
            self._flat, [name for name, _ in named], [p.shape for _, p in named],
        )  # fmt: skip

    @property
    def reports_layer_signals(self) -> bool:
        """Whether this rank reports layer signals: True, because each rank has its own weights."""
        return True

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        optimizer: torch.optim.Optimizer,
    ) -> StepResult:
        result = super().step(micro_batches, loss_function, optimizer)
        number = self.context.meter.step
        if number % self.settings.mix_every == 0:
            self.mix()
        if number == 1 or number % self.settings.measure_every == 0:
            self.context.events.emit("consensus", step=number, distance=self.distance())
        return result

    def mix(self) -> None:
        """Average this rank's parameters with its neighbours'; must be called by all ranks."""
        self._read(self._flat)
        if self.public is None:
            self.neighbours.average_(self._flat)
        else:
            self.public.mix_(self._flat, self.context.meter.step)
        self._write(self._flat)

    def distance(self) -> float:
        """Return the ranks' root mean square distance from the mean, relative to the mean's norm; call on all ranks."""
        own = torch.empty_like(self._flat, device=self.context.device)
        self._read(own)
        mean = self.group.sum_as("consensus", own.clone()).div_(self.context.world_size)
        square = (own - mean).double().square().sum().reshape(1)
        total = float(self.group.sum_as("consensus", square))
        size = float(mean.double().square().sum())
        return (total / self.context.world_size / size) ** 0.5 if size else 0.0

    def _views(self, flat: Tensor) -> list[Tensor]:
        return views_of(flat, self.parameters)

    def _read(self, flat: Tensor) -> None:
        copy_tensors_(self._views(flat), self.parameters)

    def _write(self, flat: Tensor) -> None:
        copy_tensors_(self.parameters, self._views(flat))

    def averaged(self) -> StandIns:
        flat = torch.empty_like(self._flat, device=self.context.device)
        self._read(flat)
        mean = self.group.sum_as("mean_model", flat).div_(self.context.world_size)
        return dict(zip(self.parameters, self._views(mean), strict=True))

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        held = super().held(optimizer)
        copies = [] if self.public is None else self.public.copies.values()
        return {**held, "buffers": [*held["buffers"], self._flat, *self.neighbours.work_space, *copies]}

    # Checkpoints contain the mean as their model, and also each rank's own state.

    def checkpoint_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from shardscope.training.checkpoint.optimizer_state import state_to_save

        named = self.named_optimizer(optimizer)
        return {
            "model": self.model_state(),
            _NUM_RANKS: torch.tensor(self.context.world_size),
            f"rank-{self.context.rank}": {
                "model": self.model.state_dict(),
                "optimizer": state_to_save(named, None, self.holding),
                "precision": self.precision.state_dict(),
            },
        }

    def state_to_fill(
        self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint, *, with_state: bool, within: str = ""
    ) -> dict[str, Any]:
        """Return the state to fill from a checkpoint.

        If a gossip run with the same number of ranks saved the checkpoint, this is the rank's own model and state.
        Otherwise, all ranks load one model: the mean over the ranks of a gossip run, or the model of another strategy.
        """
        ranks = {key.partition(".")[0] for key in saved.keys if key.startswith("rank-")}
        if _NUM_RANKS not in saved.keys or len(ranks) != self.context.world_size:
            return super().state_to_fill(optimizer, saved, with_state=with_state, within=within)
        name = f"rank-{self.context.rank}"
        own = super().state_to_fill(optimizer, saved, with_state=with_state, within=f"{name}.")
        own |= {"model": self.model.state_dict(), "precision": self.precision.state_dict()}
        return {"model": self.model_state(), _NUM_RANKS: torch.tensor(self.context.world_size), name: own}

    def load_checkpoint_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's own state, or the common state if ranks have no separate states."""
        if (
            self.public is not None
        ):  # start from the mean, which all ranks have, unless `load_compressor_state` restores saved copies
            mean = [state["model"][name].cpu() for name in self.public.names]
            for copy in self.public.copies.values():
                copy_tensors_(views_of(copy, mean), mean)
        own = state.get(f"rank-{self.context.rank}", state)
        super().load_checkpoint_state(own, optimizer)
        self.precision.load_state_dict(own.get("precision", {}))

    def compressor_state(self) -> dict[str, Tensor]:
        assert self.public is not None
        copies = {f"{_PUBLIC}{rank}": copy for rank, copy in self.public.copies.items()}
        return {**super().compressor_state(), **copies}

    def load_compressor_state(self, state: dict[str, Tensor]) -> None:
        assert self.public is not None
        for rank, copy in self.public.copies.items():
            saved = state.pop(f"{_PUBLIC}{rank}", None)
            if saved is not None:
                copy.copy_(saved)
        super().load_compressor_state(state)

    def reshard_compressor_state(self, state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
        """Convert the state for other ranks: public copies of former neighbours are dropped, and new copies start from
        the mean.
        """
        kept = {name: tensor for name, tensor in state.items() if not name.startswith(_PUBLIC)}
        return super().reshard_compressor_state(kept, layout)
