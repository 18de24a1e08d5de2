"""Finds the parameters that must never freeze, and those that never train, by patterns of their whole-model names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from pipetransformer.errors import SpecError
from pipetransformer.models import PipelineModel
from pipetransformer_contract.spec import Freeze

#: An error about a pattern suggests this many names.
_SUGGESTED = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the number of frozen layers.

    Attributes:
        lowest: number of leading layers that have nothing to train. They are frozen from step 0.
        highest: number of layers before the first one that must not freeze; None if all may freeze.
    """

    lowest: int = 0
    highest: int | None = None

    def clamp(self, boundary: int) -> int:
        """The boundary closest to `boundary` within the limits."""
        return max(self.lowest, boundary if self.highest is None else min(boundary, self.highest))


def always_frozen(spec: Freeze, model: PipelineModel) -> frozenset[tuple[int, str]]:
    """(unit, name inside the unit) of the parameters that `freeze.always` matches, and of those shared with them.

    Raises:
        SpecError: a pattern matches nothing, a parameter is also in `freeze.never`, or nothing would train.
    """
    always = _matches(spec.always, model, "spec.freeze.always")
    for unit, name in sorted(always & _matches(spec.never, model, "spec.freeze.never")):
        raise SpecError(
            "spec.freeze.always", f"{model.unit_name(unit)}.{name} is in freeze.never, too: remove it from one of them"
        )
    if always and always.issuperset(_parameters(model)):
        raise SpecError("spec.freeze.always", "matches every parameter: there is nothing to train")
    return frozenset(always)


def limits_of(spec: Freeze, model: PipelineModel) -> Limits:
    """The limits that follow from `freeze.never` and `freeze.always`. The last unit that trains never freezes, because
    then nothing would train.

    Args:
        spec: the spec's section `freeze`.
        model: the model. The parameters of `always_frozen` are already buffers in it.

    Raises:
        SpecError: a pattern matches nothing.
    """
    trains = {unit for unit, _ in _parameters(model)}
    lowest = max(0, min(trains) - 1) if spec.always else 0
    # A shared parameter trains until the last unit that holds it freezes.
    never = {model.ties.last_unit(unit, name) for unit, name in _matches(spec.never, model, "spec.freeze.never")}
    if trains and max(trains) <= model.num_layers:  # the head has nothing to train
        never.add(max(trains))
    return Limits(lowest, max(0, min(never) - 1) if never else None)


def _parameters(model: PipelineModel) -> Iterator[tuple[int, str]]:
    for index, unit in enumerate(model.units):
        for name, _ in unit.named_parameters():
            yield index, name


def _matches(patterns: Sequence[str], model: PipelineModel, field: str) -> set[tuple[int, str]]:
    """The parameters whose name matches a pattern, or that are in a module whose name does. Also those shared with
    them."""
    names = {(unit, name): f"{model.unit_name(unit)}.{name}" for unit, name in _parameters(model)}
    found: set[tuple[int, str]] = set()
    for pattern in patterns:
        matched = [place for place, name in names.items() if any(fnmatchcase(one, pattern) for one in _holders(name))]
        if not matched:
            known = sorted({one for name in names.values() for one in _holders(name)})
            close = get_close_matches(pattern, known, n=_SUGGESTED, cutoff=0.0)
            raise SpecError(
                field, f"{pattern!r} matches no module or parameter that trains; the closest names: {', '.join(close)}"
            )
        for unit, name in matched:
            tie = model.ties.find(unit, name)
            found |= {(unit, name), *(() if tie is None else tie.places)}
    return found


def _holders(name: str) -> list[str]:
    """The name of a parameter, and the names of all modules that it is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
