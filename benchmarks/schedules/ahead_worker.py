"""As `worker`, for rounds with frozen forwards ahead, which the product's executor does not run yet."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.virtual import Timed, UnitTimes
from benchmarks.virtual.model import Block
from pipetransformer.models import MicroBatchContext
from pipetransformer.models.context import set_micro_batch
from pipetransformer.schedules import Action, ActionKind
from pipetransformer.schedules.order import MessageKind, Receive, Send, Value, given, needed

from .ways import Way
from .worker import WIDTH


class Span(nn.Module):
    """Units in order. The first `frozen` of them keep no graph."""

    def __init__(self, units: Sequence[UnitTimes], frozen: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Timed(Block(WIDTH), unit) for unit in units)
        self._frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        for number, unit in enumerate(self.units):
            with torch.set_grad_enabled(number >= self._frozen):
                x = unit(x)
        return x


class AheadRunner:
    """Runs rounds of one way on this worker. What a round made ahead is the next round's."""

    def __init__(self, way: Way, group: dist.ProcessGroup) -> None:
        self._way, self._group = way, group
        self._operations = way.lists[group.rank()]
        self._spans = {
            span: Span([way.units[index] for index in way.cut[span]], max(0, way.frozen - way.cut[span].start))
            for span in way.shape.spans_of(group.rank())
        }
        self._prefix = Span(way.prefix, len(way.prefix))
        self._pieces: dict[int, Tensor] = {}  # chunks whose prefix has run in part
        self._activation = (way.samples, WIDTH)
        self._context = MicroBatchContext(0, range(way.samples))
        self._values: dict[Value, Tensor] = {}
        self._receives: dict[Value, dist.Work] = {}
        self._sends: list[tuple[Tensor, dist.Work]] = []
        self._flights: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def run(self) -> None:
        """One round."""
        for operation in self._operations:
            match operation:
                case Send(value, peer):
                    self._send(value, peer)
                case Receive(value, peer):
                    self._post(value, peer)
                case Action():
                    self._compute(operation)
        for _, work in self._sends:
            work.wait()
        self._sends.clear()
        self._keep_for_next_round()
        for span in self._spans.values():
            for parameter in span.parameters():
                parameter.grad = None

    def _compute(self, action: Action) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action)
            case ActionKind.BACKWARD:
                self._backward(action)
            case ActionKind.PREFIX:
                self._run_prefix(action)
            case _:
                raise NotImplementedError(action.kind)

    def _run_prefix(self, action: Action) -> None:
        x = self._pieces.pop(action.chunk, None)
        x = torch.ones(self._activation) if x is None else x
        set_micro_batch(self._context)
        with torch.no_grad():
            for index in action.units:
                x = self._prefix.units[index](x)
        gift = given(action, self._way.shape)
        if gift is None:
            self._pieces[action.chunk] = x
        else:
            self._values[gift] = x

    def _keep_for_next_round(self) -> None:
        """What was made ahead becomes the next round's: its chunks count from 0 there."""
        chunks = self._way.shape.chunks
        for value in [value for value in self._values if value.kind is MessageKind.PREFIX]:
            if value in self._receives:
                self._receives.pop(value).wait()
            tensor = self._values.pop(value)
            self._values[Value(MessageKind.PREFIX, 0, value.chunk - chunks)] = tensor

    def _forward(self, action: Action) -> None:
        shape = self._way.shape
        x = self._taken(action)
        if x is None:  # span 0 takes what was made ahead, if there is any
            x = self._values.pop(Value(MessageKind.PREFIX, 0, action.chunk), None)
        x = torch.ones(self._activation) if x is None else x
        x.requires_grad_(shape.gives_gradient(action.span))
        set_micro_batch(self._context)
        output = self._spans[action.span](x)
        if action.span == len(shape.owners) - 1:
            output = output.square().mean()
        elif (gift := given(action, shape)) is not None:
            self._values[gift] = output.detach()
        if shape.trains(action.span):
            self._flights[action.span, action.chunk] = (x, output)

    def _backward(self, action: Action) -> None:
        x, output = self._flights.pop((action.span, action.chunk))
        gradient = self._taken(action)
        torch.autograd.backward([output], None if gradient is None else [gradient])
        gift = given(action, self._way.shape)
        if gift is not None:
            assert x.grad is not None
            self._values[gift] = x.grad

    def _taken(self, action: Action) -> Tensor | None:
        """What the action needs, once it is there."""
        value = needed(action, self._way.shape)
        if value is None:
            return None
        if value in self._receives:
            self._receives.pop(value).wait()
        return self._values.pop(value)

    def _send(self, value: Value, peer: int) -> None:
        tensor = self._values.pop(value)
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None
        self._sends = [sent for sent in self._sends if not sent[1].is_completed()]
        self._sends.append((tensor, work))

    def _post(self, value: Value, peer: int) -> None:
        self._values[value] = buffer = torch.empty(self._activation)
        work = dist.irecv(buffer, group=self._group, group_src=peer)
        assert work is not None
        self._receives[value] = work
