"""The recorder of one rank: it turns the passes and updates of a training loop into the events of a run.

A step ends when the observed optimizer has stepped. Its event contains the time since the previous step (without
evaluations), the traffic and the spans. A forward pass counts once a backward pass reaches its output, so evaluations
and passes that raise an error do not count, whether or not they compute gradients. On a GPU the event is written once
the GPU has passed the end of the step, so that the training loop need not wait.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardscope.runlog.writer import EventWriter
from shardscope.runtime.observe._axes import tensor_axis
from shardscope.runtime.observe._loop import is_compiled
from shardscope.runtime.observe._marks import Mark, Marks, Value
from shardscope.runtime.observe._optimizers import Optimizers, rate_of
from shardscope.spec import Record
from shardscope.spec.numbers import LARGEST_COUNT
from shardscope.training.memory import Held, MemoryWatch, held_by_default
from shardscope.training.meter import Meter, Rows, Span
from shardscope.training.tensors_in import tensors_in

Timed = tuple[str, str, Mark, Mark, int]
"""A span that the device may not have finished yet: lane, name, start, end, bytes."""


_OUTPUT = "output of the observed model"
"""Key in the metadata of nodes of the autograd graph."""
_LATE_STEPS = 2
"""Maximum number of steps whose events are held back until the end of a collective is detected.

It is bounded because the end of some collectives is never detected."""


@dataclass
class _Forward:
    """One forward pass.

    Attributes:
        order: Number of the pass.
        is_repeated: Whether it evaluates the step's batch again, with other weights.
        backward: Number of the backward pass that first reached the output; None until one does.
    """

    order: int
    is_whole: bool
    begin: Mark
    samples: int
    tokens: int | None
    is_repeated: bool = False
    end: Mark = 0.0
    backward: int | None = None


@dataclass
class _ObservedStep:
    """Measurements of one step, collected from its start until the device has finished it."""

    number: int
    begin: Mark
    losses: dict[int, list[Value]] = field(default_factory=dict)
    """Scalars from which backward passes started, by the number of the pass."""
    own_backwards: set[int] = field(default_factory=set)
    """Numbers of the backward passes that reached an output of the model."""
    has_begun: bool = False
    is_repeated: bool = False
    """Whether the weights have changed since the step's first backward pass, as in a closure of L-BFGS or with SAM."""
    num_backwards: int = 0
    num_other_updates: int = 0
    """Number of updates of the model by optimizers other than the observed one."""
    forwards: list[_Forward] = field(default_factory=list)
    """Forward passes whose outputs backward passes of this step have reached."""
    num_in_flight: int = 0
    """Number of collectives that started in this step and whose end has not been detected."""
    spans: list[Timed] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    traffic: Rows = field(default_factory=dict)
    peaks: dict[str, int] | None = None
    skipped: bool | Value = False
    """Whether the update was skipped; a `Value` on the device is nonzero if it was."""
    end: Mark = 0.0

    @property
    def counted(self) -> list[_Forward]:
        """The forward passes of the model; if it is called in parts, the first pass that each backward pass reached."""
        ordered = sorted(self.forwards, key=lambda one: one.order)  # parts may each get the whole batch
        parts = {one.backward: one for one in reversed(ordered)}
        return [one for one in ordered if one.is_whole] or list(parts.values())

    @property
    def samples(self) -> int:
        """Number of samples of the counted forward passes."""
        return sum(one.samples for one in self.counted if not one.is_repeated)

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the counted forward passes; None if their inputs are not sequences."""
        known = [one.tokens for one in self.counted if one.tokens is not None and not one.is_repeated]
        return sum(known) if known else None


class StepRecorder:
    """Turns the passes and updates of a training loop into events. It is the `Listener` of a `Loop`.

    Args:
        model: The model.
        meter: Counts the collectives.
        events: The rank's event log.
        marks: Marks of the model's device.
        memory: Measures the memory of this rank.
        record: Which steps are recorded with spans and with memory by type.
        optimizer: The optimizer whose steps delimit the steps of the run; None if it is not known yet.
        optimizers: All optimizers that update the model.
    """

    def __init__(
        self, model: nn.Module, meter: Meter, events: EventWriter, marks: Marks, memory: MemoryWatch, *,
        record: Record, optimizer: Optimizer | None, optimizers: Optimizers,
    ) -> None:  # fmt: skip
        self.steps = 0
        self.optimizer, self._optimizers = optimizer, optimizers
        self._model, self._meter, self._events = model, meter, events
        self._marks, self._memory, self._record = marks, memory, record
        self._lock = threading.Lock()
        self._last = (0, 0)
        self._most_other_updates = 0
        self._pending: deque[_ObservedStep] = deque()
        self._measuring = ExitStack()
        self._evaluating: AbstractContextManager[None] | None = None
        self._forward: _Forward | None = None
        self._num_forwards = 0
        self._weights: int | None = None
        """Version of the weights after the last backward pass of this step; None if a forward pass has followed."""
        self._first_weights: int | None = None
        self._backward = self._update = self._marks.now()
        self._step = self._begun()

    # The listener of the loop.

    def forward_begins(self, inputs: list[Tensor], *, is_whole: bool) -> None:
        if not torch.is_grad_enabled():
            self._evaluating = self._meter.observing()
            self._evaluating.__enter__()
            return
        step = self._step
        step.has_begun = True
        if self._weights is not None:
            step.is_repeated |= _version(self._model) != self._weights
            self._weights = None
        self._num_forwards += 1
        samples = next((len(tensor) for tensor in inputs if tensor.dim()), 0)
        self._forward = _Forward(
            self._num_forwards, is_whole, self._marks.now(), samples, _tokens(inputs), step.is_repeated
        )
        if self._memory.step is not None:
            self._memory.step.hold("inputs", inputs)

    def forward_ends(self, output: Any) -> None:
        if self._evaluating is not None:
            self._evaluating.__exit__(None, None, None)
            self._evaluating = None
            if not self._step.has_begun:  # an evaluation between two steps is part of neither
                self._step.begin = self._marks.now()
            return
        if self._forward is not None:
            self._forward.end = self._marks.now()
            reached = partial(self._reached, self._forward)
            for node in _nodes(output):
                node.register_prehook(reached)
                node.metadata[_OUTPUT] = True
            self._forward = None
        self._sample()

    def _reached(self, forward: _Forward, _: Any) -> None:
        """Count a forward pass in the current step when a backward pass first reaches its output."""
        step = self._step
        step.own_backwards.add(step.num_backwards)
        if forward.backward is None:
            forward.backward = step.num_backwards
            step.forwards.append(forward)
            with self._lock:
                step.spans.append(("compute", "forward", forward.begin, forward.end, 0))

    def backward_begins(self, roots: Any) -> None:
        self._backward = self._marks.now()
        self._step.num_backwards += 1
        losses = [] if self._step.is_repeated else _scalars(roots)
        if losses:
            self._step.losses[self._step.num_backwards] = [Value(each) for each in losses]

    def backward_ends(self) -> None:
        self._add("compute", "backward", self._backward)
        self._update = self._marks.now()  # an optimizer with a closure updates from this point on
        self._weights = _version(self._model)
        if self._first_weights is None:
            self._first_weights = self._weights
        self._sample()

    def update_begins(self, optimizer: Optimizer) -> None:
        if optimizer is self.optimizer:
            self._update = self._marks.now()

    def update_ends(self, optimizer: Optimizer, *, skipped: bool) -> None:
        if optimizer is not self.optimizer:
            self._weights = (
                None  # the same batch with other weights is not evaluated for this optimizer's sake
            )
            self._step.num_other_updates += self._optimizers.take(optimizer)
            return
        if not skipped:
            self._add("compute", "optimizer", self._update)
        # a GradScaler steps a fused optimizer in any case, which then skips the update on the device
        found = getattr(optimizer, "found_inf", None)
        self._step.skipped = Value(found) if isinstance(found, Tensor) else skipped
        self._end_step()

    def collective_begins(self, name: str, payload: int) -> Any:
        """Start the span of a collective, and return the function to call when the collective has ended."""
        step, start = self._step, self._marks.now()
        with self._lock:
            step.num_in_flight += 1
        return lambda: self._collective_ends(name, start, payload, step)

    def _collective_ends(self, name: str, start: Mark, payload: int, step: _ObservedStep) -> None:
        self._add("communication", name, start, payload, step)
        with self._lock:
            step.num_in_flight -= 1

    # Steps.

    def _begun(self) -> _ObservedStep:
        number = self._meter.step = self.steps + 1
        if self._record.measures_memory(number, 1, LARGEST_COUNT) and not _is_compiled(self._model):
            self._measuring.enter_context(self._memory.measure(self._held, (), self._model))
        return _ObservedStep(number, self._marks.now())

    def _held(self) -> Any:
        return held_by(self._model, self._optimizers)

    def _sample(self) -> None:
        if self._memory.step is not None:
            self._memory.step.sample()

    def _add(
        self, lane: str, name: str, start: Mark, num_bytes: int = 0, step: _ObservedStep | None = None
    ) -> None:
        end = self._marks.now()
        with self._lock:  # collectives end on the backend's own threads
            (step or self._step).spans.append((lane, name, start, end, num_bytes))

    def _end_step(self) -> None:
        assert self.optimizer is not None
        step, measured = self._step, self._memory.step
        memory = self._memory.sample()
        self._measuring.close()
        step.peaks = None if measured is None else measured.peaks
        step.facts = {
            "lr": rate_of(self.optimizer, "lr"),
            "memory_bytes": memory,
            "peak_memory_bytes": self._memory.peak,
        }
        step.traffic, _ = self._meter.drain()
        step.end = self._marks.now()
        self._weights = None
        self._most_other_updates = max(self._most_other_updates, step.num_other_updates)
        self.steps, self._last = step.number, (step.samples, len(step.counted))
        following = self._begun()
        following.begin = step.end
        with self._lock:
            self._step = following
        self._pending.append(step)
        self.write_finished()

    def write_finished(self, *, wait: bool = False) -> None:
        """Write the events of the steps that the device has finished; `wait` waits until it has finished all steps."""
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        while self._pending and self._marks.is_past(self._pending[0].end):
            if self._pending[0].num_in_flight and len(self._pending) <= _LATE_STEPS and not wait:
                return  # the backend's thread has not yet reported the end of a collective
            self._write(self._pending.popleft())

    def close(self) -> Rows:
        """Write all remaining events, and return the traffic outside steps: during start-up and evaluations."""
        self._measuring.close()
        self.write_finished(wait=True)
        with self._meter.observing():
            return self._meter.drain()[0]

    @property
    def is_trained_without_step(self) -> bool:
        """Whether backward passes of the model have run, but no step has ended."""
        return not self.steps and bool(self._step.own_backwards)

    @property
    def is_replaced(self) -> bool:
        """Whether other optimizers have updated the model since the last step, more often than in any earlier step."""
        return self.steps > 0 and self._step.num_other_updates > self._most_other_updates + 1

    @property
    def has_changed_weights(self) -> bool:
        """Whether weights have been changed in place since the first backward pass."""
        return self._first_weights not in (None, _version(self._model))

    @property
    def last(self) -> tuple[int, int]:
        """Numbers of samples and of forward passes of this rank in the last step; both 0 before a step has ended."""
        return self._last

    def _write(self, step: _ObservedStep) -> None:
        seconds = self._marks.seconds
        time_s = max(seconds(step.end) - seconds(step.begin), 1e-6)
        spans = {"spans": self._spans(step)} if self._record.shows(step.number) else {}
        skipped = step.skipped if isinstance(step.skipped, bool) else step.skipped.read() != 0
        self._events.emit(
            "step", step=step.number, loss=_loss(step), skipped=skipped, **self._read(step),
            step_time_s=round(time_s, 6), grad_norm=None, loss_scale=None, **step.facts,
            traffic=step.traffic, **spans,
        )  # fmt: skip
        if step.peaks is not None:
            self._events.emit("memory", step=step.number, **step.peaks)

    def _read(self, step: _ObservedStep) -> dict[str, int | None]:
        """Return the numbers of samples and tokens; ranks of a tensor axis read the same ones, which count once."""
        if self._is_copy:
            return {"samples": 0, "tokens": None}
        return {"samples": step.samples, "tokens": step.tokens}

    @cached_property
    def _is_copy(self) -> bool:
        """Whether another rank reads the same samples and comes first; known once a step has ended."""
        return tensor_axis(self._model)[1] > 0

    def _spans(self, step: _ObservedStep) -> list[list[Any]]:
        seconds = self._marks.seconds
        with self._lock:
            timed = list(step.spans)
        past = [row for row in timed if self._marks.is_past(row[3])]
        return [Span(row[0], row[1], seconds(row[2]), seconds(row[3]), row[4]).as_row() for row in past]


def held_by(model: nn.Module, optimizers: Optimizers) -> Held:
    """Return the tensors that a model and its optimizers keep in memory, by type (such as parameters)."""
    held = {**held_by_default(model, torch.optim.SGD([torch.empty(0)])), "optimizer": optimizers.state}
    return {kind: [each for each in tensors if not is_lazy(each)] for kind, tensors in held.items()}


def _loss(step: _ObservedStep) -> float | None:
    """Return the sum of the losses over the model's backward passes; None if none of them started from a scalar.

    If no forward pass of the model was observed, as when torch.compile traces it, all backward passes count.
    """
    own = step.own_backwards or step.losses.keys()
    values = [value.read() for number, losses in step.losses.items() if number in own for value in losses]
    return sum(values) if values else None


def _scalars(roots: Any) -> list[Tensor]:
    """Return the scalars among the roots of a backward pass; if several, only those that depend on a model output.

    If none of them does, as when torch.compile traces the forward pass, all are returned.
    """
    each = [roots] if isinstance(roots, Tensor) else list(roots) if isinstance(roots, list | tuple) else []
    scalars = [root for root in each if isinstance(root, Tensor) and root.numel() == 1]
    own = [root for root in scalars if len(scalars) == 1 or _depends_on_output(root)]
    return own or scalars


def _depends_on_output(root: Tensor) -> bool:
    waiting, seen = [root.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()  # torch's stub of `metadata` is wrong
        if node is None or node in seen:
            continue
        if _OUTPUT in node.metadata:
            return True
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
    return False


def _version(model: nn.Module) -> int:
    """Return a number that changes when a weight is changed in place."""
    return sum(each._version for each in model.parameters() if not (is_lazy(each) or each.is_inference()))  # noqa: SLF001


def _tokens(inputs: list[Tensor]) -> int | None:
    """Return the number of tokens of these inputs, if the first is a batch of integer sequences."""
    first = next((tensor for tensor in inputs if tensor.dim()), None)
    if first is None or first.is_floating_point() or first.dim() != 2:
        return None
    return first.numel()


def _nodes(output: Any) -> list[Any]:
    """Return the nodes of the autograd graph that computed the tensors in a model's output."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    nodes = [tensor.grad_fn for tensor in leaves or tensors_in(output)]
    return [node for node in nodes if node is not None]


def _is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile traces the model; if so, the trace would include hooks that count activations."""
    return any(map(is_compiled, model.modules()))
