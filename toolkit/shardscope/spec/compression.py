"""Gradient compression: which method, how hard, and how compressed gradients meet.

A setting left at None takes the method's default; `Compression.settings` shows what that comes to. A setting that the
method would ignore is refused, as it is for optimizers.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Choice
from shardscope.spec.numbers import Count, CountOrZero

if TYPE_CHECKING:
    from shardscope.spec.job import Job

Kind = Literal["none", "sums", "packets", "layers", "steps"]
"""How a method works on a gradient, which decides what strategies can carry it.

``sums``: each number by itself, into something that may be added up on the way. ``packets``: each number by itself, or
in small blocks, into bytes that must be unpacked before they are added. ``layers``: a tensor at a time. ``steps``: over
the course of several steps, together with the optimizer.
"""

Ratio = Annotated[float, Field(gt=0, le=1)]
Bits = Annotated[int, Field(ge=2, le=8)]
_BLOCKS = {"block": 256, "feedback": False, "exchange": "two-phase"}
_SPARSE = {"ratio": 0.01, "feedback": True}

DEFAULTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "none": {},
        "fp16": {},
        "bf16": {},
        "fp8": _BLOCKS,
        "int8": _BLOCKS,
        "int4": _BLOCKS,
        "qsgd": {"bits": 8, "block": 256, "exchange": "two-phase"},
        "terngrad": {"clip": 2.5, "exchange": "two-phase"},
        "natural": {"exchange": "two-phase"},
        "sign": {"block": 1024, "feedback": True, "exchange": "two-phase"},
        "sign-vote": {},
        "randomk": _SPARSE,
        "randomblock": {**_SPARSE, "block": 256},
        "topk": {**_SPARSE, "selection": "sampled", "exchange": "gather"},
        "dgc": {"ratio": 0.001, "momentum": 0.9, "clip": "off", "warmup_steps": 0, "exchange": "gather"},
        "powersgd": {"rank": 4, "feedback": True, "warmup_steps": 0},
        "onebit-adam": {"warmup_steps": None, "block": 1024},
        "onebit-lamb": {"warmup_steps": None, "block": 1024},
        "local-sgd": {"every": 8},
        "adaptive-bits": {"budget": 4.0, "update_every": 20, "block": 256, "feedback": False},
        "adaptive-rank": {"error": 0.3, "rank": 8, "update_every": 20, "feedback": True, "warmup_steps": 0},
    }
)
"""The settings that have an effect on each method, with their defaults."""

KINDS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "none": "none",
        **dict.fromkeys(("fp16", "bf16", "randomk", "randomblock"), "sums"),
        **dict.fromkeys(
            ("fp8", "int8", "int4", "qsgd", "terngrad", "natural", "sign", "sign-vote", "topk"), "packets"
        ),
        **dict.fromkeys(("powersgd", "adaptive-bits", "adaptive-rank"), "layers"),
        **dict.fromkeys(("dgc", "onebit-adam", "onebit-lamb", "local-sgd"), "steps"),
    }
)
USEFUL_WARMUP = 5
"""Fewest warm-up steps of the 1-bit methods. On digits (100 steps, 2 ranks, 3 seeds each) the test loss ended at 3 to
11 times the uncompressed run's after 1 step, at up to twice after 2 or 3, and at up to 1.5 times after 5 or 10."""
PROBES = 8
"""Random directions along which adaptive-rank looks for what its factors miss, in the steps in which it looks."""
_ONEBIT = MappingProxyType({"onebit-adam": "adamw", "onebit-lamb": "lamb"})
"""With the optimizer that each needs."""
_LOW_RANK = ("powersgd", "adaptive-rank")
_CASTS = ("none", "fp16", "bf16")
_WARM_RATIO = 0.25
"""The ratio that dgc starts its warm-up with (Lin et al. 2018, section 3.3)."""


class Compression(Choice):
    """A way to compress gradients, and its settings; None means the method's default.

    Example:
        >>> Compression("topk", ratio=0.05).settings["selection"]
        'sampled'
    """

    _field = "compression"
    _defaults = DEFAULTS

    name: str = "none"
    """A name in `DEFAULTS`, such as ``int8``, ``topk``, ``powersgd`` or ``onebit-adam``."""
    ratio: Ratio | None = None
    """Share of the elements that is sent, 0 < value <= 1. randomk, randomblock and topk 0.01, dgc 0.001."""
    block: int | None = Field(default=None, ge=8, le=65536)
    """Elements that share one scale (or, for randomblock, that are sent together); a multiple of 8, 8 to 65536."""
    bits: Bits | None = None
    """qsgd: bits an element, the sign among them, 2 to 8. Default 8."""
    rank: int | None = Field(default=None, ge=1, le=256)
    """powersgd: rank of every matrix's approximation (default 4). adaptive-rank: the largest rank (default 8)."""
    selection: Literal["sampled", "exact"] | None = None
    """topk: find the threshold in a sample of the elements (default), or sort all of them."""
    feedback: bool | None = None
    """Error feedback: what a step leaves out is added to the next step's gradient."""
    exchange: Literal["two-phase", "gather"] | None = None
    """How packets meet: each rank unpacks, adds and packs again its share (its cost does not grow with the ranks), or
    every rank receives all packets (it does)."""
    clip: float | Literal["off"] | None = None
    """terngrad: standard deviations at which gradients are clipped (default 2.5). dgc: the norm at which each rank's
    own gradient is clipped, divided by the root of the number of ranks; default ``off``."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """dgc: momentum kept on each rank, in place of the optimizer's. Default 0.9; 0 is plain error feedback."""
    warmup_steps: CountOrZero | None = None
    """Uncompressed steps at the start: onebit-* (default: 20 % of the job's, at least 5), powersgd and adaptive-rank
    (default 0). dgc: steps in which the ratio falls from 0.25 to its own (default 0)."""
    every: Count | None = None
    """local-sgd: steps between two averages of the parameters. Default 8."""
    budget: float | None = Field(default=None, gt=0, le=8)
    """adaptive-bits: mean bits an element, over all layers and without the blocks' scales, 2 to 8. Default 4."""
    error: float | None = Field(default=None, gt=0, lt=1)
    """adaptive-rank: largest relative error of each approximated matrix, as far as `rank` allows, 0 < value < 1.
    Default 0.3."""
    update_every: Count | None = None
    """adaptive-*: steps between two looks at the gradients, after which bits or ranks move. Default 20."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.block is not None and self.block % 8:
            raise SpecError(
                f"compression.block={self.block} is no multiple of 8; use for example {-(-self.block // 8) * 8}"
            )
        if isinstance(self.clip, float) and self.clip <= 0:
            raise SpecError(f"compression.clip={self.clip:g} is not above 0; use 2.5, or 'off' with dgc")
        if self.name == "terngrad" and self.clip == "off":
            raise SpecError(
                "compression.clip='off' is not possible with terngrad; give standard deviations, such as 2.5"
            )
        if self.name == "adaptive-bits" and self.settings["budget"] < 2:
            raise SpecError(f"compression.budget={self.budget:g} bits an element is less than 2; use 2 to 8")
        return self

    @property
    def is_on(self) -> bool:
        """Whether anything is compressed at all."""
        return self.name != "none"

    @property
    def kind(self) -> Kind:
        """How the method works on a gradient."""
        return KINDS[self.name]

    @property
    def period(self) -> int:
        """Steps after which what crosses the wire repeats itself: those between two averages of local-sgd, else 1."""
        return int(self.settings.get("every", 1))

    @property
    def label(self) -> str:
        """The method with what was set, such as ``topk ratio=0.05``."""
        given = [f"{field}={value:g}" if isinstance(value, float) else f"{field}={value}"
                 for field, value in self._given().items()]  # fmt: skip
        return " ".join([self.name, *given])

    def warmup(self, steps: int) -> int:
        """Uncompressed steps at the start of a job of so many: as given, or of a 1-bit job a fifth, at least 5."""
        given = self.settings["warmup_steps"]
        return max(-(-steps // 5), USEFUL_WARMUP) if given is None else int(given)

    def stretched(self, steps: int, to: int) -> Compression:
        """For a job of `to` steps instead of `steps`: a given warm-up keeps its share, and a 1-bit one its least.

        Example:
            >>> Compression("onebit-adam", warmup_steps=20).stretched(100, to=10).warmup_steps
            5
            >>> Compression("powersgd", warmup_steps=20).stretched(100, to=10).warmup_steps
            2
        """
        if not self.warmup_steps or to == steps:
            return self
        least = min(self.warmup_steps, USEFUL_WARMUP) if self.name in _ONEBIT else 0
        share = round(self.warmup_steps * to / steps)
        return self.model_copy(update={"warmup_steps": min(to, max(least, share))})

    def uncompressed(self, steps: int) -> int:
        """Steps at the start of a job of so many that send gradients as they are; dgc begins gently, and has none."""
        return self.warmup(steps) if self.name in (*_ONEBIT, *_LOW_RANK) else 0

    @property
    def steps_are_alike(self) -> bool:
        """Whether each step exchanges as much as any other, as far as the settings say."""
        return self.period == 1 and self.name not in _ONEBIT and self.at_step(1) == self

    def at_step(self, step: int) -> Compression:
        """The method as it is set at a step, from 1, where its warm-up goes by the step alone.

        Low-rank methods are ``none`` while they warm up. The ratio of dgc falls from 0.25 to its own, by equal factors
        as in Lin et al. 2018, section 3.3, a step at a time instead of an epoch. 1-bit methods, whose warm-up may have
        ended in an earlier run, stay as they are.

        Example:
            >>> Compression("dgc", ratio=0.01, warmup_steps=2).at_step(2).ratio
            0.05
            >>> [Compression("powersgd", warmup_steps=2).at_step(step).name for step in (2, 3)]
            ['none', 'powersgd']
        """
        settings = self.settings
        if self.name in _LOW_RANK:
            return Compression() if step <= settings["warmup_steps"] else self
        if self.name != "dgc" or step > settings["warmup_steps"] or settings["ratio"] >= _WARM_RATIO:
            return self
        left = 1 - (step - 1) / settings["warmup_steps"]
        return self.model_copy(
            update={"ratio": settings["ratio"] * (_WARM_RATIO / settings["ratio"]) ** left}
        )

    @property
    def differs_because(self) -> str | None:
        """Why a compressed run need not end where an uncompressed one does, as a clause; None where it must."""
        return None if self.name == "none" else f"{self.name} changes the gradients that are exchanged"

    def check_follows(self, before: str) -> None:
        """Refuse to go on from a checkpoint that another method has saved, where this one must have begun the run.

        Raises:
            SpecError: It freezes what it has learned in its warm-up.
        """
        if self.name in _ONEBIT and before != self.name:
            raise SpecError(
                f"compression={self.name!r} cannot go on where {before!r} has trained: it lives by what it learns in "
                "its warm-up; start with it, or go on with another method"
            )

    def check(self, job: Job) -> None:
        """Refuse what the job's strategy, precision or optimizer cannot go with.

        Raises:
            SpecError: With the field, the value and the way out.
        """
        if not self.is_on:
            return
        if self.kind not in type(job.strategy).carries:
            raise SpecError(
                f"compression={self.name!r} does not go with strategy={job.strategy.kind!r}; {self._way_out(job)}"
            )
        if self.exchange is not None and not type(job.strategy).has_exchanges:
            raise SpecError(
                f"compression.exchange={self.exchange!r} has no effect with strategy={job.strategy.kind!r}, whose "
                "packets go straight to where they are unpacked; leave it out"
            )
        if job.precision == "fp16" and self.name not in _CASTS:
            raise SpecError(
                f"compression={self.name!r} does not go with precision='fp16', whose gradients overflow by design; "
                "use precision='bf16', or compression='fp16'"
            )
        self._check_optimizer(job)

    def _way_out(self, job: Job) -> str:
        """What goes with the job's strategy, and which strategies take this method."""
        from shardscope.spec.strategy import STRATEGIES  # they name the kinds above

        carried = type(job.strategy).carries
        names = [name for name in DEFAULTS if name != "none" and KINDS[name] in carried]
        takers = ", ".join(kind for kind, strategy in STRATEGIES.items() if self.kind in strategy.carries)
        if names:
            return f"it takes {', '.join(names)}, and {self.name} goes with {takers}"
        return f"it exchanges no gradients; use compression='none', or one of {takers}"

    def _check_optimizer(self, job: Job) -> None:
        name, settings = job.optimizer.name, job.optimizer.settings
        wanted = _ONEBIT.get(self.name)
        if wanted and name != wanted:
            raise SpecError(
                f"compression={self.name!r} does not go with optimizer={name!r}; use optimizer={wanted!r}"
            )
        if wanted and job.clip_norm is not None:
            raise SpecError(
                f"clip_norm={job.clip_norm:g} does not go with compression={self.name!r}, which exchanges momenta; "
                "leave it out"
            )
        if wanted:
            self._check_onebit(job)
        if self.name == "dgc" and self.settings["momentum"]:
            self._check_momentum(settings)
        if self.at_step(job.steps).name != self.name:
            raise SpecError(
                f"compression.warmup_steps={self.warmup_steps} of steps={job.steps} leaves {self.name} no step to "
                f"compress; use 0 to {job.steps - 1}"
            )

    def _check_momentum(self, settings: dict[str, Any]) -> None:
        """Dgc keeps the momentum itself: a second one would be applied to what it sends."""
        betas = settings.get("betas", (0.0, 0.0))
        field, value = ("betas[0]", betas[0]) if betas[0] else ("momentum", settings.get("momentum", 0.0))
        if value:
            raise SpecError(
                f"optimizer.{field}={value:g} would come on top of compression.momentum="
                f"{self.settings['momentum']:g}; use optimizer='sgd' without momentum, or compression.momentum=0"
            )

    def _check_onebit(self, job: Job) -> None:
        clipped = job.optimizer.settings.get("max_grad_norm", "off")
        if clipped != "off":
            raise SpecError(
                f"optimizer.max_grad_norm={clipped:g} does not go with compression={self.name!r}, which exchanges "
                "momenta; use max_grad_norm='off'"
            )
        if job.steps <= USEFUL_WARMUP:
            raise SpecError(
                f"steps={job.steps} are too few for compression={self.name!r}, which begins after a warm-up of at "
                f"least {USEFUL_WARMUP}; use at least {USEFUL_WARMUP + 1}"
            )
        warmup = self.warmup(job.steps)
        if not USEFUL_WARMUP <= warmup < job.steps:
            why = (
                "no step to compress"
                if warmup >= job.steps
                else "a second moment of too few gradients to freeze"
            )
            raise SpecError(
                f"compression.warmup_steps={warmup} of steps={job.steps} leaves {self.name} {why}; "
                f"use {USEFUL_WARMUP} to {job.steps - 1}"
            )
