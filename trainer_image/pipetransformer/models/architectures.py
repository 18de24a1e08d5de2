"""The classes of transformers that can be cut into units: ours, and those that a user registers.

Registering imports nothing of transformers, so a program may do it before it knows whether a job needs the library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipetransformer.data import Task
from pipetransformer.errors import SpecError, meant
from pipetransformer.user_code import import_function

#: Embedding, blocks and head.
Units = tuple[nn.Module, list[nn.Module], nn.Module]
Split = Callable[[Any], Units]


@dataclass(frozen=True)
class Architecture:
    """How one class of transformers is cut.

    Attributes:
        name: of the class.
        split: from the whole model to its embedding, blocks and head.
        task: what the class learns.
        first_position: from its configuration to the first of the positions that samples use.
        model_class: the class itself, where it is not one of transformers.
    """

    name: str
    split: Split
    task: Task
    first_position: Callable[[Any], int]
    model_class: type | None = None


_registered: dict[str, Architecture] = {}
_by_function: dict[Split, Architecture] = {}


def register_architecture(
    architecture: str | type,
    *,
    task: Task | str,
    first_position: int | Callable[[Any], int] = 0,
) -> Callable[[Split], Split]:
    """Decorate a function that cuts a class of transformers into units, so that `Model(name="huggingface")` trains it.

    The function gets the whole model, and returns its embedding, the list of its blocks, and its head. They are made of
    the model's own modules, and each is a module from one tensor to one tensor. Names of weights need no care, because
    they are found by identity. Attention masks, lengths of samples and dropout are the trainer's work: call a block
    with hidden states alone.

    Register in every process before `train`: at the top of the script. In a job, put the function into a module of the
    trainer's image, and name it in `model.architecture` as `module:function`.

    Args:
        architecture: name of a class of transformers, such as `DistilBertForSequenceClassification`, or a class of your
            own that derives from its `PreTrainedModel`.
        task: what the class learns: `Class`, `NextToken` or `MaskedToken`.
        first_position: row of the table of positions that a sample's first token takes, or a function from the
            configuration to it. It tells how long samples may be.

    Returns:
        A decorator that returns the function as it is.

    Raises:
        ValueError: there is no such task.
    """
    name = architecture if isinstance(architecture, str) else architecture.__name__
    learns = Task(task)

    def register(function: Split) -> Split:
        made = Architecture(
            name,
            function,
            learns,
            first_position if callable(first_position) else lambda _: first_position,
            None if isinstance(architecture, str) else architecture,
        )
        _registered[name] = _by_function[function] = made
        return function

    return register


def register_own(architecture: Architecture) -> None:
    """One of ours, unless a user has registered another function for the class."""
    _registered.setdefault(architecture.name, architecture)


def find_architecture(name: str, *, field: str = "spec.model.architecture") -> Architecture:
    """The architecture of this name, or at `module:function`.

    Raises:
        SpecError: it is unknown, or what stands there is not registered.
    """
    if ":" in name:
        found = _by_function.get(import_function(name, field=field))
        if found is None:
            raise SpecError(field, f"{name} is not decorated with pipetransformer.register_architecture(...)")
        return found
    if name not in _registered:
        raise SpecError(field, unsupported(name))
    return _registered[name]


def registered_for(fits: Callable[[Architecture], bool]) -> list[Architecture]:
    """All architectures for which `fits` holds, by name."""
    return [_registered[name] for name in sorted(_registered) if fits(_registered[name])]


def unsupported(name: str) -> str:
    """What to tell of an architecture that is unknown: the list of those that are known, and how to add one."""
    return (
        f'Unsupported architecture "{name}"{meant(name, _registered)}. Supported: {", ".join(sorted(_registered))}. '
        "To add one, cut it into embedding, blocks and head in a function under "
        "pipetransformer.register_architecture(...): docs/models.md shows how"
    )
