"""The classes of the library transformers that can be cut into units: built-in ones, and those that a user registers.

Registering does not import transformers, so a program may register a class even if the job does not need the library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipetransformer.data import Task
from pipetransformer.errors import SpecError, meant
from pipetransformer.user_code import import_function

#: Embedding, layers and head of a model.
Units = tuple[nn.Module, list[nn.Module], nn.Module]
Split = Callable[[Any], Units]
#: Takes a configuration, and returns the row of the position table for a sample's first token.
FirstRow = Callable[[Any], int]
Decorator = Callable[[Split], Split]


@dataclass(frozen=True)
class Architecture:
    """How one class of transformers is cut into units.

    Attributes:
        name: name of the class.
        split: takes a whole model, and returns its embedding, layers and head.
        task: what models of the class learn.
        first_position: takes the model's configuration, and returns the row of the position table for a sample's first
            token.
        model_class: the class itself, if it is a user's own; None for a class of the library.
        slices_tokens: whether the units can run slices of tokens; see `PipelineModel`.
    """

    name: str
    split: Split
    task: Task
    first_position: FirstRow
    model_class: type | None
    slices_tokens: bool


_registered: dict[str, Architecture] = {}
_by_function: dict[Split, Architecture] = {}


def register_architecture(
    architecture: str | type,
    *,
    task: Task | str,
    first_position: int | FirstRow = 0,
    slices_tokens: bool = False,
) -> Decorator:
    """Decorate a function that cuts a class of transformers into units, so that `Model(name="huggingface")` trains it.

    The function gets the whole model and returns its embedding, the list of its layers, and its head. They must consist
    of the model's own modules, and each maps one tensor to one tensor. Saved weights keep the names of transformers,
    because the trainer recognises them as objects. Call a layer with hidden states only: the trainer provides attention
    masks, sample lengths and dropout.

    Register in each process before `train`: at the top of the script. In a job, put the function into a module of the
    trainer's image, and name it in `model.architecture` as `module:function`.

    Args:
        architecture: the name of a class of transformers, such as `DistilBertForSequenceClassification`, or your own
            class that derives from its `PreTrainedModel`.
        task: what the class learns: `Class`, `NextToken` or `MaskedToken`.
        first_position: the row of the position table for a sample's first token, or a function that returns it from
            the configuration. Samples can be as long as the table has rows from there on.
        slices_tokens: whether the units can run slices of tokens, as `schedule: TeraPipe` needs. Then each position may
            see only earlier ones, by transformers' attention functions with `is_causal`, and positions must come from
            `current_micro_batch().places(...)`.

    Returns:
        A decorator that returns the function unchanged.

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
            slices_tokens,
        )
        _registered[name] = _by_function[function] = made
        return function

    return register


def register_built_in(architecture: Architecture) -> None:
    """Register a built-in architecture, unless a user has registered another function for the class."""
    _registered.setdefault(architecture.name, architecture)


def find_architecture(name: str) -> Architecture:
    """The architecture of this name, or at `module:function`.

    Raises:
        SpecError: the name is unknown, or the function is not registered.
    """
    field = "spec.model.architecture"
    if ":" in name:
        found = _by_function.get(import_function(name, field=field))
        if found is None:
            raise SpecError(field, f"{name} is not decorated with pipetransformer.register_architecture(...)")
        return found
    if name not in _registered:
        raise SpecError(field, unsupported(name))
    return _registered[name]


def all_architectures() -> list[Architecture]:
    """All registered architectures, by name."""
    return [_registered[name] for name in sorted(_registered)]


def unsupported(name: str) -> str:
    """The error message for an unknown architecture. It lists those that are supported, and says how to add one."""
    return (
        f'Unsupported architecture "{name}"{meant(name, _registered)}. Supported: {", ".join(sorted(_registered))}. '
        "To add one, decorate a function that cuts it into embedding, layers and head with "
        "pipetransformer.register_architecture(...): docs/models.md shows how"
    )
