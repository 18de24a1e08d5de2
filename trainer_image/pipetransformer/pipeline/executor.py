"""Runs one worker's part of a round: its computations, sends and receives, in the order of `schedules.planned`.

Messages have one tag. NCCL matches those of two workers by their order alone, and both workers issue the same
sequence. A receive is posted and a send is started without waiting. A computation waits for its input. The end of the
round waits for the sends.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.cache import run_frozen
from pipetransformer.device_copies import to_device
from pipetransformer.errors import RunningModel
from pipetransformer.schedules import Action, ActionKind, MessageKind, Operation, Receive, RoundShape, Send, Value
from pipetransformer.schedules.operations import output_of

from . import backward_halves
from .chunk import Chunks
from .stage import Passage, RoundHooks, Span
from .stopwatch import Stopwatch
from .target import Target

_BACKWARD = RunningModel("backward")
#: The tag of all messages. They use the methods of the group: `dist.isend` takes 20 microseconds more.
_TAG = 0


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs the rounds of one worker of a pipeline.

    Attributes:
        spans: this worker's spans, by their index.
        group: process group of the pipeline's workers, in order.
        device: the device of this worker.
        dtype: type of activations.
        frozen: the frozen units that `PREFIX` actions run, from the model's first unit on; empty if there are none.
    """

    spans: Mapping[int, Span]
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    frozen: Sequence[nn.Module] = ()

    def run(
        self,
        operations: Sequence[Operation],
        shape: RoundShape,
        chunks: Chunks,
        target: Target,
        hooks: RoundHooks | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Run a round. Gradients add up in the `grad` of the parameters.

        Args:
            operations: this worker's operations, as `schedules.planned` returns them.
            shape: the shape of the round; `operations` were planned for it.
            chunks: the chunks of the round in order, followed by those of the next round that have `PREFIX` actions.
            target: takes the outputs of the last span.
            hooks: called around the computations; None to call nothing.
            stopwatch: measures the computations, without their waits for messages; None to measure nothing.

        Raises:
            RuntimeError: a connection broke.
            ModelError: the model failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
        """
        _Round(self, shape, chunks, target, hooks, stopwatch or Stopwatch()).run(operations)


@dataclass(slots=True)
class _Flight:
    """A chunk between its forward and the end of its backward on one span.

    Attributes:
        input: the span's input; None on the first span.
        output: the tensor where the backward starts: the span's output, or the loss on the last span.
        passage: calls the hooks as the backward passes units; None without hooks.
        gradient: the gradient of the output. It is set between the two halves of a backward.
        rest: what the first half of a backward left for the second half.
    """

    input: Tensor | None
    output: Tensor
    passage: Passage | None
    gradient: Tensor | None = None
    rest: backward_halves.WeightGradients | None = None


class _Round:
    def __init__(
        self,
        executor: Executor,
        shape: RoundShape,
        chunks: Chunks,
        target: Target,
        hooks: RoundHooks | None,
        stopwatch: Stopwatch,
    ) -> None:
        self._executor, self._shape, self._chunks, self._target = executor, shape, chunks, target
        self._hooks, self._stopwatch = hooks, stopwatch
        self._last = len(shape.owners) - 1
        self._flights: dict[tuple[int, int], _Flight] = {}
        #: Values that this worker has computed, until they are sent or another span of this worker takes them.
        self._outputs: dict[Value, Tensor] = {}
        self._posted: dict[Value, tuple[Tensor, dist.Work]] = {}
        #: Tensors that are being sent. Each must stay in memory until its send has completed.
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            match operation:
                case Action(ActionKind.STEP, span, step):
                    self._step(span, step)
                case Action():
                    self._stopwatch.start()
                    self._compute(operation)
                    self._stopwatch.stop()
                case Receive(value, peer):
                    self._post(value, peer)
                case Send(value, peer):
                    self._send(value, peer)
        if 0 in self._executor.spans:
            for number in range(self._shape.chunks, len(self._chunks)):
                self._chunks[number].frozen_output = self._wait_for(Value(MessageKind.PREFIX, 0, number))
        for _, work in self._sent:
            work.wait()

    def _compute(self, action: Action) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action.span, action.chunk)
            case ActionKind.BACKWARD:
                self._backward(action.span, action.chunk)
            case ActionKind.INPUT_GRADIENT:
                self._input_half(action.span, action.chunk)
            case ActionKind.WEIGHT_GRADIENT:
                self._weight_half(action.span, action.chunk)
            case ActionKind.PREFIX:
                self._prefix(action)

    def _prefix(self, action: Action) -> None:
        """Run some frozen units for a chunk of this round or of the next."""
        chunk = self._chunks[action.chunk]
        assert chunk.frozen_input is not None
        units = [self._executor.frozen[unit] for unit in action.units]
        with RunningModel("forward of the frozen layers"):
            chunk.frozen_input = run_frozen(units, to_device(chunk.frozen_input, self._executor.device), chunk.context)
        value = output_of(action, self._shape)
        if value is not None:
            self._outputs[value], chunk.frozen_input = chunk.frozen_input.contiguous(), None

    def _forward(self, index: int, number: int) -> None:
        span, chunk, trains = self._executor.spans[index], self._chunks[number], self._shape.trains(index)
        if index == 0 and self._shape.prefix_units and not self._shape.prefix_made:
            chunk.frozen_output = self._take(Value(MessageKind.PREFIX, 0, number))
        x = self._take(Value(MessageKind.ACTIVATION, index, number)) if index else None
        if x is not None and self._shape.gives_gradient(index):
            x.requires_grad_()
        with torch.set_grad_enabled(trains):
            if self._hooks is None:
                passage, output = None, span.forward(x, chunk)
            else:
                passage = Passage(span.trained, self._hooks)
                with self._hooks.forward_weights(index, number):
                    output = span.forward(x, chunk, passage)
            if index == self._last:
                output = self._target.take(output, chunk)
        if index < self._last:
            self._outputs[Value(MessageKind.ACTIVATION, index + 1, number)] = output.detach()
        if trains:
            self._flights[index, number] = _Flight(x, output, passage)

    def _backward(self, index: int, number: int) -> None:
        flight = self._flights.pop((index, number))
        gradient = self._gradient_of_output(index, number)
        if flight.passage is not None:
            flight.passage.begun = True
        if self._goes_back(index, flight):
            with _BACKWARD, nullcontext() if self._hooks is None else self._hooks.backward_weights(index, number):
                torch.autograd.backward(flight.output, gradient)
        if flight.passage is not None:
            flight.passage.end()
        if flight.input is not None:
            self._give_gradient(index, number, flight.input, flight.input.grad)

    def _input_half(self, index: int, number: int) -> None:
        flight = self._flights[index, number]
        flight.gradient = self._gradient_of_output(index, number)
        if flight.input is None or not self._shape.gives_gradient(index):
            return  # no span needs the gradient of the input, so the second half computes the whole backward
        if not self._goes_back(index, flight):
            self._give_gradient(index, number, flight.input, None)
            return
        with _BACKWARD:
            at_once = self._chunks[number].context.recompute
            gradient, flight.rest = backward_halves.begin(flight.output, flight.input, flight.gradient, at_once=at_once)
        self._give_gradient(index, number, flight.input, gradient)

    def _weight_half(self, index: int, number: int) -> None:
        flight = self._flights.pop((index, number))
        with _BACKWARD:
            if flight.rest is not None:
                backward_halves.finish(flight.rest)
            elif not self._shape.gives_gradient(index) and self._goes_back(index, flight):
                torch.autograd.backward(flight.output, flight.gradient)
        if flight.passage is not None:
            flight.passage.end()

    def _step(self, index: int, step: int) -> None:
        """Step the optimizer on the span's weights. Pass the summed weight of the step's samples on to the span before,
        which divides its gradients by the same number."""
        assert self._hooks is not None
        if index == self._last:
            weights = [self._chunks[number].weight for number in self._shape.chunks_of(step)]
            weight = torch.stack([each for each in weights if each is not None]).sum(dtype=torch.float64)
        else:
            weight = self._wait_for(Value(MessageKind.WEIGHT, index, step))
        if self._shape.gives_gradient(index):
            self._outputs[Value(MessageKind.WEIGHT, index - 1, step)] = weight
        self._hooks.step(index, step, weight)

    def _goes_back(self, index: int, flight: _Flight) -> bool:
        """Whether to run a backward from the output.

        If the loss has no gradient, the backward still runs so that autograd raises an error. It does not run if
        nothing trains, because all layers are frozen and the head has no parameters.
        """
        if flight.output.requires_grad:
            return True
        return index == self._last and bool(self._executor.spans[index].parameters())

    def _gradient_of_output(self, index: int, number: int) -> Tensor | None:
        return self._take(Value(MessageKind.GRADIENT, index, number)) if index < self._last else None

    def _give_gradient(self, index: int, number: int, x: Tensor, gradient: Tensor | None) -> None:
        if self._shape.gives_gradient(index):
            if gradient is None:
                gradient = torch.zeros_like(x)  # units that do not use their input leave no gradient
            self._outputs[Value(MessageKind.GRADIENT, index - 1, number)] = gradient

    def _take(self, value: Value) -> Tensor:
        """Take the input of a computation. The stopwatch pauses while this waits for a message."""
        if value not in self._posted:
            return self._outputs.pop(value)
        self._stopwatch.stop()
        received = self._wait_for(value)
        self._stopwatch.start()
        return received

    def _wait_for(self, value: Value) -> Tensor:
        if value not in self._posted:
            return self._outputs.pop(value)
        buffer, work = self._posted.pop(value)
        work.wait()
        return buffer

    def _post(self, value: Value, peer: int) -> None:
        executor = self._executor
        if value.kind is MessageKind.WEIGHT:
            buffer = torch.empty((), dtype=torch.float64, device=executor.device)
        else:
            buffer = torch.empty(self._chunks[value.chunk].shape, dtype=executor.dtype, device=executor.device)
        self._posted[value] = buffer, executor.group.recv([buffer], peer, _TAG)

    def _send(self, value: Value, peer: int) -> None:
        tensor = self._outputs.pop(value).contiguous()  # groups cannot send views
        work = self._executor.group.send([tensor], peer, _TAG)
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        self._sent.append((tensor, work))
