"""Writes and reads the folder of a finished model: the weights, and a description to build the network again.

A model of the library transformers is saved in the library's format, with its tokenizer or image processor. The weights
of other models are in one file, by whole-model name.
"""

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import torch
from pydantic import ConfigDict, ValidationError
from torch import Tensor

from pipetransformer.data import DataInfo, Processor, Task
from pipetransformer.errors import SpecError
from pipetransformer.models import ModelFunction, PipelineModel, ScriptModel, build_model, import_huggingface
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Data, Model, Precision
from pipetransformer_contract.wire import Wire

from .files import Folder
from .store import from_bytes, to_bytes

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
CONFIG = "pipetransformer.json"


class Kind(StrEnum):
    """Where the network comes from."""

    VIT = "vit"  #: built into the trainer; the spec gives its sizes
    TRANSFORMERS = "transformers"  #: a class of the library transformers, whose `from_pretrained` reads the folder
    FUNCTION = "function"  #: a function that the spec names as `module:function`
    SCRIPT = "script"  #: a function that a program gave to `train`


class ModelConfig(Wire):
    """The contents of `pipetransformer.json`. In the file names are in camelCase.

    Attributes:
        made_by: name and version of the package that wrote the folder.
        kind: where the network comes from.
        model_class: name of the model's class.
        function: `module:function` that builds the network; empty if it has no such name, as for a lambda.
        model: the section `model` of the job's spec.
        data: the section `data` of the job's spec.
        steps: committed steps of these weights.
        precision: precision of the training.
        dtype: type of the weights in the folder, such as `float32`.
        input_shape: shape of one input, without the batch.
        input_dtype: type of an input, such as `int64` for tokens.
        num_classes: number of classes of a target; 0 if unknown.
        vocab_size: number of token ids; 0 if the inputs are not tokens.
        task: what a target is; None if unknown.
        labels: names of the classes, in order; empty if they have none.
        lengths: the lengths to which samples are padded, ascending; empty if all have one length.
        pad_id: id of padding; None if there is no such token.
        start_id: id at the start of a text; None if there is no such token.
        end_id: id at the end of a text; None if there is no such token.
        files: the other files of the folder that belong to the model.
    """

    model_config = ConfigDict(protected_namespaces=())

    made_by: str
    kind: Kind
    model_class: str
    function: str
    model: Model
    data: Data
    steps: int
    precision: Precision
    dtype: str
    input_shape: tuple[int, ...]
    input_dtype: str
    num_classes: int
    vocab_size: int
    task: Task | None
    labels: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    pad_id: int | None = None
    start_id: int | None = None
    end_id: int | None = None
    files: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the weights in the folder."""
        return _dtype(self.dtype)

    @property
    def torch_input_dtype(self) -> torch.dtype:
        """Type of an input."""
        return _dtype(self.input_dtype)

    @property
    def info(self) -> DataInfo:
        """Facts about the training data, as the model's function got them."""
        return DataInfo(**{each.name: getattr(self, each.name) for each in fields(DataInfo)})


def write_model(
    location: str,
    tensors: Mapping[str, Tensor],
    *,
    config: ModelConfig,
    info: DataInfo,
    processor: Processor | None = None,
) -> None:
    """Write the weights and then `pipetransformer.json` into a folder. Files of the model that was there are removed,
    because readers would mix them with the new ones, such as shards of weights. Other files stay.

    Args:
        location: path or fsspec URL of the folder, which is created if needed.
        tensors: parameters and buffers by whole-model name, such as `blocks.3.attn.qkv.weight`.
        config: description of the model.
        info: facts about the training data.
        processor: the tokenizer or image processor that made the inputs.
    """
    folder, files = Folder(location), set[str]()
    if config.kind is not Kind.TRANSFORMERS:  # no temporary file: a full temporary folder must not lose the weights
        folder.write(WEIGHTS, to_bytes(tensors, {"format": "pt"}))
        files.add(WEIGHTS)
    if config.kind is Kind.TRANSFORMERS or processor is not None:
        with _scratch() as scratch:
            with _naming_scratch():
                if config.kind is Kind.TRANSFORMERS:
                    huggingface = import_huggingface()
                    huggingface.save_pretrained(config.model, info, tensors, scratch, dtype=config.torch_dtype)
                    if processor is None and config.model.path:
                        huggingface.keep_processor(config.model.path, scratch)
                if processor is not None:
                    processor.save_pretrained(str(scratch))
            for path in sorted(path for path in scratch.rglob("*") if path.is_file()):
                file = str(path.relative_to(scratch))
                folder.write(file, path.read_bytes())
                files.add(file)
    _remove_earlier(folder, files)
    described = _described(config.model_copy(update={"files": tuple(sorted(files))}))
    folder.write(CONFIG, json.dumps(described, indent=2).encode())


@contextmanager
def _naming_scratch() -> Iterator[None]:
    """Name the temporary folder in errors of its disk, because a message about the output would mislead."""
    try:
        yield
    except OSError as error:
        raise OSError(f"the temporary folder {tempfile.gettempdir()} (TMPDIR): {error}") from error


@contextmanager
def _scratch() -> Iterator[Path]:
    """A context with a new temporary folder."""
    with _naming_scratch():
        name = tempfile.mkdtemp()
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _remove_earlier(folder: Folder, files: Collection[str]) -> None:
    """Remove the files of an earlier model, except `files`. A store that forbids it keeps them, with a warning."""
    try:
        earlier = ModelConfig.model_validate_json(folder.read(CONFIG)).files
    except (FileNotFoundError, ValidationError):
        return
    for file in set(earlier) - set(files):
        if not {"", ".", ".."}.isdisjoint(file.split("/")):
            continue  # an edited list must not remove what is outside
        try:
            folder.remove(file)
        except OSError as error:
            logger.warning("%s of an earlier model stays: %s", folder.path(file), error)


def _described(config: ModelConfig) -> dict[str, object]:
    """The contents of `pipetransformer.json`. Only for `vit` they include the sizes in the section `model`."""
    said = config.model_dump(mode="json", by_alias=True)
    only = None if config.kind is Kind.VIT else {"name", "path", "architecture", "num_layers", "options"}
    said["model"] = config.model.model_dump(mode="json", by_alias=True, include=only)
    said["data"] = config.data.to_wire()
    return said


#: Whether this thread imports a program to find the function that builds its network.
_importing = ContextVar("importing", default=False)


def importing_for_model() -> bool:
    """Whether `load_model` imports the running program's module. Its training must not begin again."""
    return _importing.get()


def load_config(location: str) -> ModelConfig:
    """Read the description in a model folder.

    Raises:
        FileNotFoundError: the folder holds no model.
    """
    folder = Folder(location)
    try:
        return ModelConfig.model_validate_json(folder.read(CONFIG))
    except FileNotFoundError as error:
        below = f" (did you mean {location}/model?)" if folder.exists("model") else ""
        message = f"{location} holds no finished model: there is no {CONFIG}{below}"
        raise FileNotFoundError(message) from error


def load_model(location: str, model: ModelFunction | None = None) -> PipelineModel:
    """Load the trained model as units, in evaluation mode on the CPU.

    Args:
        location: path or fsspec URL of the model folder.
        model: if a program's function builds the network: the function to use in place of the one in the
            description; None to use that one.

    Raises:
        FileNotFoundError: the folder holds no model.
        SpecError: the network cannot be built on this machine.
        RuntimeError: the weights do not fit the network.
    """
    config = load_config(location)
    if config.kind is Kind.TRANSFORMERS:
        with local_copy(location) as folder:
            built: PipelineModel = import_huggingface().load_pretrained(
                config.model, config.info, folder, dtype=config.torch_dtype
            )
    else:
        built = _built(config, model)
        _load_weights(built, from_bytes(Folder(location).read(WEIGHTS)), location)
    for unit in built.units:
        unit.eval()
    return built


def _load_weights(model: PipelineModel, weights: dict[str, Tensor], location: str) -> None:
    """Load all weights of a folder into the units.

    Raises:
        RuntimeError: a unit lacks weights, has others, or no unit has a weight of the folder.
    """
    changed = "was the function that builds the network changed after the training?"
    left = dict(weights)
    for index, unit in enumerate(model.units):
        prefix = model.unit_name(index) + "."
        own = {name.removeprefix(prefix): left.pop(name) for name in weights if name.startswith(prefix)}
        try:
            unit.load_state_dict(own)
        except RuntimeError as error:
            raise RuntimeError(f"the weights in {location} do not fit {prefix[:-1]}; {changed} {error}") from error
    if left:
        some = f"{len(left)} weights in {location}, such as {min(left)}"
        raise RuntimeError(f"the network has no place for {some}; {changed}")


@contextmanager
def local_copy(location: str) -> Iterator[Path]:
    """A context with a local folder of the model's files: the folder itself, or a temporary copy of a URL's files."""
    if Path(location).is_dir():
        yield Path(location)
        return
    folder = Folder(location)
    with tempfile.TemporaryDirectory() as scratch:
        for name in filter(None, folder.sizes("")):  # no sub-folders, such as those of a tokenizer
            (Path(scratch) / name).write_bytes(folder.read(name))
        yield Path(scratch)


def _built(config: ModelConfig, function: ModelFunction | None) -> PipelineModel:
    if config.kind is not Kind.SCRIPT:
        return build_model(config.model, config.info, seed=0, dtype=config.torch_dtype)
    sample = torch.zeros(1, *config.input_shape, dtype=config.torch_input_dtype)
    made = ScriptModel(function or _function_of(config), sample, seed=0, dtype=config.torch_dtype)
    model = made.shell()
    return model.with_units(made.build_units(range(model.num_layers + 2)))


def _function_of(config: ModelConfig) -> ModelFunction:
    """Find the function that builds the network: in the running program, otherwise by importing its module.

    Raises:
        SpecError: the description names no function, or the function cannot be imported on this machine.
    """
    how = "pass the function that builds the network: load_model(folder, model=...)"
    if not config.function:
        raise SpecError("model", f"was built by a function that cannot be imported: {how}")
    module, _, name = config.function.partition(":")
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").stem == module and callable(getattr(main, name, None)):
        found: ModelFunction = getattr(main, name)
        return found
    before = _importing.set(True)
    try:
        return import_function(config.function, field="model")
    except SpecError as error:
        raise SpecError("model", f"{error}: {how}") from error
    finally:
        _importing.reset(before)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
