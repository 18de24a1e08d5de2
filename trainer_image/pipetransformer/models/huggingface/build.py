"""Builds models of transformers unit by unit, with new weights or those of a checkpoint, and saves them in its format.

The whole model exists only on the meta device. A worker allocates only the units that it holds.
"""

import copy
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from pipetransformer.data import DataInfo
from pipetransformer.errors import SpecError, building
from pipetransformer.models.architectures import Units
from pipetransformer.models.dtype import cast
from pipetransformer.models.model import PipelineModel, unit_name
from pipetransformer.models.randomness.dropout import derive_seed
from pipetransformer.models.randomness.keyed import key_unit, place_of
from pipetransformer.models.randomness.seeded import one_at_a_time, seeded
from pipetransformer_contract.spec import Model

from .configuration import architecture_of, make_config, model_class_of

logger = logging.getLogger(__name__)

#: Files of tokenizers and image processors, as transformers names them.
_PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
#: An error message names at most this many weights.
_NAMED = 3


def shell(spec: Model, info: DataInfo, *, seed: int, dtype: torch.dtype) -> PipelineModel:
    """The whole model on the meta device.

    Raises:
        SpecError: the model is unknown or does not fit the data.
    """
    return _shell(spec, info, seed, dtype).model


def build_units(
    spec: Model, info: DataInfo, indices: Collection[int], *, seed: int, dtype: torch.dtype
) -> dict[int, nn.Module]:
    """Build units by index on the CPU, with the weights of the spec's checkpoint, or initialised if it has none.

    Raises:
        SpecError: the model is unknown or does not fit the data, or the checkpoint does not fit the model.
    """
    return _shell(spec, info, seed, dtype).build(indices)


def load_pretrained(spec: Model, info: DataInfo, folder: Path, *, dtype: torch.dtype) -> PipelineModel:
    """Read a model that `save_pretrained` wrote, as units on the CPU."""
    empty = _Shell(_saved(spec, folder), info, 0, dtype)
    return empty.model.with_units(empty.build(range(spec.num_layers + 2)))


def load_trained(spec: Model, folder: Path, *, dtype: torch.dtype) -> Any:
    """Read a model that `save_pretrained` wrote, as an object of its class of transformers. It is in evaluation mode,
    on the CPU.

    Raises:
        SpecError: its architecture is not registered in this process.
    """
    model_class = model_class_of(architecture_of(_saved(spec, folder)))
    return model_class.from_pretrained(folder, dtype=dtype).eval()


def class_name(spec: Model) -> str:
    """Name of the class that the spec selects, such as `BertForSequenceClassification`.

    Raises:
        SpecError: an option or the architecture is unknown, or the checkpoint cannot be read.
    """
    return architecture_of(spec).name


def _saved(spec: Model, folder: Path) -> Model:
    return spec.model_copy(update={"path": str(folder), "options": {}})


def save_pretrained(
    spec: Model, info: DataInfo, tensors: Mapping[str, Tensor], folder: Path, *, dtype: torch.dtype
) -> None:
    """Write a model into a folder that `from_pretrained` of transformers can read.

    Args:
        spec: the model's part of the job's spec.
        info: the data that the model was trained on.
        tensors: all parameters and buffers of the model, by whole-model name.
        folder: a local folder.
        dtype: type of all floating-point parameters.
    """
    empty = _Shell(spec, info, 0, dtype)
    state = {name: tensors[ours].detach().cpu() for name, ours in empty.names().items()}
    empty.whole.load_state_dict(state, assign=True)
    empty.whole.tie_weights()
    empty.whole.config._attn_implementation = None  # a model that is read back uses the library's attention
    empty.whole.save_pretrained(folder)
    if spec.path and empty.whole.can_generate():
        keep_files(spec.path, folder, [GENERATION_CONFIG_NAME])


def keep_processor(path: str, folder: Path) -> None:
    """Copy the tokenizer or image processor of the checkpoint at `path` to a folder. Call it if the data have none."""
    keep_files(path, folder, _PROCESSOR_FILES)


def keep_files(path: str, folder: Path, names: Sequence[str]) -> None:
    """Copy files of the checkpoint at `path` unchanged, if they exist. transformers itself refuses to write some files
    that it can read, such as certain generation configurations."""
    for name in names:
        try:
            theirs = cached_file(
                path,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError as error:  # for example, the hub no longer has the file
            logger.warning("the model is saved without the file %s of %s: %s", name, path, error)
            continue
        if theirs is not None:
            shutil.copyfile(theirs, folder / name)


def _shell(spec: Model, info: DataInfo, seed: int, dtype: torch.dtype) -> "_Shell":
    """The shell of a model. The newest one is kept, because a worker needs first its shapes and then its units."""
    return _cached(spec.model_dump_json(), info, seed, dtype)


@lru_cache(maxsize=1)
def _cached(spec_json: str, info: DataInfo, seed: int, dtype: torch.dtype) -> "_Shell":
    return _Shell(Model.model_validate_json(spec_json), info, seed, dtype)


class _Shell:
    """One model on the meta device, in two forms with the same modules.

    Attributes:
        whole: an object of the class of transformers.
        model: a `PipelineModel` of its units.
    """

    def __init__(self, spec: Model, info: DataInfo, seed: int, dtype: torch.dtype) -> None:
        self._spec = spec
        self._seed = seed
        self._dtype = dtype
        config, architecture = make_config(spec, info)
        self._architecture = architecture
        self._class = model_class_of(architecture)
        with one_at_a_time, building("spec.model.options", f"{architecture.name} cannot be built"):
            with torch.device("meta"):
                self.whole: Any = cast(self._class(config), dtype)
            self._fill_constants(config)
        embedding, blocks, head = self._split(self.whole)
        activation, slices = self._activation(embedding, info), architecture.slices_tokens
        self.model = PipelineModel(embedding, blocks, head, activation, slices_tokens=slices)
        self.names()  # refuses a model that could not be saved
        for index, unit in enumerate(self.model.units):
            self._key_draws(index, unit)

    def _split(self, whole: Any) -> Units:
        name = self._architecture.name
        with building("spec.model.architecture", f"the function registered for {name} failed"):
            embedding, blocks, head = self._architecture.split(whole)
            units = [embedding, *blocks, head]
        if not all(isinstance(unit, nn.Module) for unit in units):
            raise SpecError("spec.model.architecture", f"the function registered for {name} must return modules only")
        return embedding, list(blocks), head

    def _activation(self, embedding: nn.Module, info: DataInfo) -> tuple[int, ...]:
        if info.vocab_size:
            return (info.input_shape[0], self.whole.config.hidden_size)
        with torch.no_grad(), building("spec.model.architecture", f"the embedding of {self._architecture.name} failed"):
            picture = torch.empty(1, *info.input_shape, dtype=self._dtype, device="meta")
            return tuple(embedding(picture).shape[1:])

    def names(self) -> dict[str, str]:
        """Our whole-model name of each tensor that transformers saves, by its name in transformers.

        Raises:
            SpecError: a tensor is in no unit.
        """
        ours = {
            id(tensor): f"{self.model.unit_name(index)}.{name}"
            for index, unit in enumerate(self.model.units)
            for name, tensor in unit.state_dict(keep_vars=True).items()
        }
        whole = self.whole.state_dict(keep_vars=True)
        if lost := [name for name, tensor in whole.items() if id(tensor) not in ours]:
            raise SpecError(
                "spec.model.architecture",
                f"the function registered for {self._architecture.name} leaves out {_some(lost)}, which would never "
                "train",
            )
        return {name: ours[id(tensor)] for name, tensor in whole.items()}

    def build(self, indices: Collection[int]) -> dict[int, nn.Module]:
        if self._spec.path:
            return self._load(indices)
        return {index: self._initialised(index) for index in indices}

    def _fill_constants(self, config: Any) -> None:
        """Fill the buffers that are not part of `state_dict`, so that a unit is complete once it gets its state.

        Classes of the library fill them in `_init_weights`. A user's own class may fill its buffers, also those of
        `state_dict`, only where it makes them. So it is built once with buffers on the CPU. If a buffer is computed
        from parameters, they are on the CPU, too.
        """
        if self._architecture.model_class is None:
            for module in self.whole.modules():
                if module._non_persistent_buffers_set:
                    module.to_empty(device="cpu", recurse=False)
                    self.whole._init_weights(module)
        elif any(True for _ in self.whole.buffers()):
            with seeded(self._seed), _without_parameters():
                filled = cast(self._class(config), self._dtype)
            if any(buffer.is_meta for buffer in filled.buffers()):
                with seeded(self._seed):
                    filled = cast(self._class(config), self._dtype)
            _take_buffers(self.whole, filled)

    def _empty(self, index: int) -> nn.Module:
        unit = self.model.units[index]
        memory: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="cpu")) for p in unit.parameters()}
        memory |= {id(b): torch.empty_like(b, device="cpu") for b in unit.buffers() if b.is_meta}
        return copy.deepcopy(unit, memory)

    def _initialised(self, index: int) -> nn.Module:
        unit = self._empty(index)
        with seeded(derive_seed(self._seed, index)), torch.no_grad():
            unit.apply(self.whole._init_weights)
            for tie in self.model.ties.all:
                (first, first_name), *copies = tie.places
                for other, name in copies:
                    if other == index:
                        unit.get_parameter(name).copy_(self._initialised(first).get_parameter(first_name))
        return unit

    def _load(self, indices: Collection[int]) -> dict[int, nn.Module]:
        try:
            # If the checkpoint lacks the head, or has one for other labels, all workers initialise the same head.
            with seeded(self._seed):
                whole, found = self._class.from_pretrained(
                    self._spec.path,
                    config=self.whole.config,
                    dtype=self._dtype,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except Exception as error:
            message = f"{self._spec.path}: {type(error).__name__}: {error}"
            raise SpecError("spec.model.path", message, reason="ModelUnreadable") from error
        self._check_loaded(found["missing_keys"], found["mismatched_keys"])
        if self._architecture.model_class is not None:
            _take_buffers(whole, self.whole, of_state=False)
        embedding, blocks, head = self._split(whole)
        units = [embedding, *blocks, head]
        return {index: self._key_draws(index, copy.deepcopy(units[index])) for index in indices}

    def _check_loaded(self, missing: Collection[str], mismatched: Collection[tuple[str, Any, Any]]) -> None:
        """Check that the checkpoint has all weights in the right shape. Those that only the head has may be missing, or
        have another shape, because they are initialised then.

        Raises:
            SpecError: other weights are missing or have another shape.
        """
        path, tensors = self._spec.path, self.whole.state_dict(keep_vars=True)
        *body, head = (set(map(id, unit.state_dict(keep_vars=True).values())) for unit in self.model.units)
        may_be_drawn = {name for name, tensor in tensors.items() if id(tensor) in head.difference(*body)}
        sizes = [
            f"{name} has shape {tuple(theirs)}, not {tuple(wanted)}"
            for name, theirs, wanted in sorted(mismatched)
            if name not in may_be_drawn
        ]
        if sizes:
            options = ", ".join(self._spec.options)
            raise SpecError("spec.model.options", f"{options} do not fit the weights in {path}: {_some(sizes)}")
        lost = sorted(set(missing) - may_be_drawn)
        if lost:
            message = f"{path} has no weights of {self._class.__name__}: {_some(lost)} are missing"
            raise SpecError("spec.model.path", message, reason="ModelUnreadable")

    def _key_draws(self, index: int, unit: nn.Module) -> nn.Module:
        """Key the random draws of a unit, each with its own place. Returns the unit that replaces it."""
        unit = key_unit(unit, index, unit_name(index, self._spec.num_layers), seed=self._seed)
        for number, (_, module) in enumerate(unit.named_modules(remove_duplicate=False)):
            if hasattr(module, "is_causal"):
                module.randomness = (self._seed, place_of(index, number))
        return unit


@contextmanager
def _without_parameters() -> Iterator[None]:
    """A context in which each parameter moves to the meta device when a module gets it, so that it takes no memory."""

    def moved(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _take_buffers(whole: nn.Module, filled: nn.Module, *, of_state: bool = True) -> None:
    """Let `whole` take the buffers of `filled`, a model of the same class. `of_state`: also those of `state_dict`."""
    found = dict(filled.named_buffers(remove_duplicate=False))
    for path, module in whole.named_modules():
        for name in module._buffers:
            if of_state or name in module._non_persistent_buffers_set:
                module._buffers[name] = found.get(".".join(filter(None, (path, name))))
