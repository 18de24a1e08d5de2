"""Makes a configuration of transformers from the job's spec, and checks that it fits the data."""

from pathlib import Path
from typing import Any

import transformers

from pipetransformer.data import BYTE_VOCABULARIES, DataInfo, Task
from pipetransformer.errors import SpecError, meant
from pipetransformer.models.architectures import Architecture, all_architectures, find_architecture, unsupported
from pipetransformer_contract.spec import Model

from .attention import NAME
from .families import DEFAULT_ARCHITECTURES

#: Names in a configuration of the sizes that a narrower model divides. Not all configurations have all of them.
_WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner")
#: A model with a larger vocabulary was not trained on bytes. Models with a tokenizer have thousands of tokens.
_MOST_OF_BYTES = 512


def architecture_of(spec: Model) -> Architecture:
    """The architecture that the spec names.

    Raises:
        SpecError: an option or the architecture is unknown, or the checkpoint cannot be read.
    """
    return _configured(spec)[1]


def check_before_data(spec: Model, task: Task | None, *, of_bytes: bool) -> Task:
    """Check what can be checked before the data are read; see `models.check_model_spec`."""
    config, architecture = _configured(spec)
    _check_task(architecture, task)
    if of_bytes:
        _check_bytes(config, spec)
    model_class_of(architecture)
    return architecture.task


def make_config(spec: Model, info: DataInfo) -> tuple[Any, Architecture]:
    """Make the configuration of the spec's checkpoint or options. Returns it and the architecture to train.

    Options that the spec does not set, such as the size of the vocabulary, come from the data.

    Raises:
        SpecError: an option or the architecture is unknown, the checkpoint cannot be read, or an option does not fit
            the data.
    """
    config, architecture = _configured(spec)
    options = {name: value for name, value in spec.options.items() if name != "model_type"}
    if not spec.path:
        own_names = type(config).attribute_map  # other names of options, such as n_layer for num_hidden_layers
        open_values = {"num_hidden_layers": spec.num_layers, **_from_data(config, architecture, info)}
        options = {own_names.get(name, name): value for name, value in [*open_values.items(), *options.items()]}
        try:  # a new configuration, because one value may follow from another
            config = transformers.AutoConfig.for_model(config.model_type, **options)
        except Exception as error:
            message = f"{type(config).__name__}: {type(error).__name__}: {error}"
            raise SpecError("spec.model.options", message) from error
    else:
        for name, value in options.items():
            setattr(config, name, value)
    _check_task(architecture, info.task)
    if architecture.task is Task.CLASS:  # other tasks have a label for each token of the vocabulary
        config.num_labels = _num_labels(architecture, options.get("num_labels"), info)
        if len(info.labels) == config.num_labels:
            config.id2label = dict(enumerate(info.labels))
            config.label2id = {label: number for number, label in enumerate(info.labels)}
    config._attn_implementation = NAME
    _check(config, architecture, spec, info)
    return config, architecture


def widths(spec: Model, info: DataInfo) -> tuple[str, dict[str, int]]:
    """Name of the class that the spec selects, and the model's widths by their names in the configuration.

    Raises:
        SpecError: an option or the architecture is unknown, the checkpoint cannot be read, or an option does not fit
            the data.
    """
    config, architecture = make_config(spec, info)
    found = {name: getattr(config, name, None) for name in _WIDTHS}
    return architecture.name, {name: size for name, size in found.items() if isinstance(size, int)}


def _check_task(architecture: Architecture, task: Task | None) -> None:
    """Check that models of this class learn the data's task. Does nothing if `task` is None, because it is unknown.

    Raises:
        SpecError: they learn another task. The message names both tasks.
    """
    if task not in (None, architecture.task):
        raise SpecError(
            "spec.data.options.task",
            f"the data's task is {task}, but {architecture.name} learns {architecture.task}: set "
            f"task: {architecture.task}, or name another class in spec.model.architecture",
        )


def _configured(spec: Model) -> tuple[Any, Architecture]:
    """The configuration of the checkpoint, or the default one of the model type; and the architecture to train.

    Raises:
        SpecError: an option or the architecture is unknown, or the checkpoint cannot be read.
    """
    model_type = spec.options.get("model_type")
    named = find_architecture(spec.architecture) if spec.architecture else None
    for each in all_architectures():
        if each.model_class is not None:
            _introduce(each.model_class)
    if spec.path:
        try:
            config = transformers.AutoConfig.from_pretrained(spec.path)
        except Exception as error:
            if spec.path.count("/") > 1 and not Path(spec.path).exists():  # a hub id has at most one slash
                words = f"there is no folder {Path(spec.path).absolute()}"
                raise SpecError("spec.model.path", words, reason="ModelUnreadable") from error
            message = f"{spec.path}: {type(error).__name__}: {error}"
            raise SpecError("spec.model.path", message, reason="ModelUnreadable") from error
    elif model_type in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(model_type)
    else:
        known = ", ".join(sorted(DEFAULT_ARCHITECTURES))
        raise SpecError(
            "spec.model.options.model_type",
            f"{model_type!r} is not a model type of transformers{meant(str(model_type), DEFAULT_ARCHITECTURES)}: use "
            f"one of {known}, or name a checkpoint in path",
        )
    for name in spec.options:
        if name != "model_type" and not hasattr(config, name):
            where = (
                "; it is one of its rope_parameters" if name in (getattr(config, "rope_parameters", None) or ()) else ""
            )
            words = f"{type(config).__name__} has no {name}{where or meant(name, _option_names(config))}"
            raise SpecError(f"spec.model.options.{name}", words)
    architecture = named or _default_architecture(config)
    wanted = config_class_of(architecture)
    if wanted is not None and not isinstance(config, wanted):
        message = f"{architecture.name} is of the model type {wanted.model_type}, but the model of {config.model_type}"
        raise SpecError("spec.model.architecture", message)
    return config, architecture


def _introduce(model_class: Any) -> None:
    """Register the configuration class of a user's model class with `AutoConfig`."""
    config_class = model_class.config_class
    if config_class.model_type not in transformers.CONFIG_MAPPING:
        transformers.AutoConfig.register(config_class.model_type, config_class)


def _option_names(config: Any) -> list[str]:
    return [*config.to_dict(), *type(config).attribute_map]


def _default_architecture(config: Any) -> Architecture:
    """The architecture of a configuration's model type, for a job that names none.

    Raises:
        SpecError: no architecture of the model type is known, or several are.
    """
    default = DEFAULT_ARCHITECTURES.get(config.model_type)
    if default is not None:
        return find_architecture(default)
    found = [each for each in all_architectures() if config_class_of(each) is type(config)]
    if len(found) == 1:
        return found[0]
    field = "spec.model.architecture"
    if found:
        names = ", ".join(each.name for each in found)
        raise SpecError(field, f"set it to one of {names}: all have the model type {config.model_type}")
    saved = getattr(config, "architectures", None) or [config.model_type]
    raise SpecError(field, unsupported(saved[0]))


def model_class_of(architecture: Architecture) -> Any:
    """The class of an architecture: one of transformers, or a user's own.

    Raises:
        SpecError: transformers has no such class, or the class does not support attention functions.
    """
    found: Any = architecture.model_class or getattr(transformers, architecture.name, None)
    if found is None:
        raise SpecError(
            "spec.model.architecture", f"transformers {transformers.__version__} has no {architecture.name}"
        )
    if not found._supports_attention_backend:
        raise SpecError(
            "spec.model.architecture",
            f"{architecture.name} computes attention by its own code, which cannot get sample lengths or dropout keys: "
            "it is not supported",
        )
    return found


def config_class_of(architecture: Architecture) -> Any:
    """The configuration class of an architecture; None if transformers has no such class."""
    found: Any = architecture.model_class or getattr(transformers, architecture.name, None)
    return getattr(found, "config_class", None)


def _from_data(config: Any, architecture: Architecture, info: DataInfo) -> dict[str, Any]:
    if hasattr(config, "image_size") and len(info.input_shape) == 3:
        channels, height, width = info.input_shape
        return {"num_channels": channels, "image_size": height if height == width else (height, width)}
    if hasattr(config, "vocab_size") and info.vocab_size:
        # The library's default ids of special tokens belong to other vocabularies, so set all of them. The embedding
        # row of the padding id never trains. A language model gets no padding id: its samples are packed, and its
        # tokenizer may pad with the end-of-text token, which must train.
        pad = None if architecture.task is Task.NEXT_TOKEN else info.pad_id
        ids = {"pad_token_id": pad, "bos_token_id": info.start_id, "eos_token_id": info.end_id}
        return {"vocab_size": info.vocab_size, **ids}
    return {}


def _num_labels(architecture: Architecture, asked: int | None, info: DataInfo) -> int:
    """The number of a classifier's outputs: that of the classes, or a larger one that the options ask for."""
    if asked is None and info.num_classes < 1:
        message = f"has an unknown number of classes, but {architecture.name} needs it: set model.options.num_labels"
        raise SpecError("spec.data", message)
    if asked is not None and asked < info.num_classes:
        message = f"is {asked}, but the data have {info.num_classes} classes"
        raise SpecError("spec.model.options.num_labels", message)
    return info.num_classes if asked is None else asked


def _check(config: Any, architecture: Architecture, spec: Model, info: DataInfo) -> None:
    if config.num_hidden_layers != spec.num_layers:
        raise SpecError(
            "spec.model.numLayers", f"is {spec.num_layers}, but the model has {config.num_hidden_layers} layers"
        )
    wants_tokens = not hasattr(config, "image_size")
    if wants_tokens != bool(info.vocab_size):
        kind = "tokens" if wants_tokens else "images"
        how = ". If they are tokens, use a table with the column input_ids, or a Dataset with DataInfo(vocab_size=...)"
        raise SpecError(
            "spec.data",
            f"{config.model_type} needs {kind}, not samples of {info.input_shape}{how if wants_tokens else ''}",
        )
    if not wants_tokens:
        shape = (config.num_channels, *_pair(config.image_size))
        if shape != info.input_shape:
            raise SpecError(
                "spec.model.options.image_size", f"the model takes {shape}, but the data have {info.input_shape}"
            )
        return
    if info.vocab_size in BYTE_VOCABULARIES:
        _check_bytes(config, spec)
    if config.vocab_size < info.vocab_size:
        raise SpecError(
            "spec.model.options.vocab_size", f"is {config.vocab_size}, but the data have {info.vocab_size} tokens"
        )
    _check_length(config, architecture, info.input_shape[0])


def _check_bytes(config: Any, spec: Model) -> None:
    """Check that a pretrained model that was trained with a tokenizer does not get bytes as tokens.

    Raises:
        SpecError: it would. The message says how to set the tokenizer.
    """
    if spec.path and config.vocab_size > _MOST_OF_BYTES:
        raise SpecError(
            "spec.data.options.tokenizer",
            f"samples are bytes, but {spec.path} was trained with a vocabulary of {config.vocab_size} tokens: "
            "set its tokenizer, with the dataset huggingface",
        )


def _check_length(config: Any, architecture: Architecture, length: int) -> None:
    try:
        first = architecture.first_position(config)
    except TypeError as error:
        if config.pad_token_id is not None:
            raise
        raise SpecError(
            "spec.data.options.tokenizer",
            f"{architecture.name} counts positions from the id of the padding token, but the data have none: use a "
            "tokenizer that has one, or set pad_id in DataInfo",
        ) from error
    rows = getattr(config, "max_position_embeddings", None)  # some families have no limit
    if rows is not None and rows - first < length:
        message = f"samples have {length} tokens, but the model has only {rows - first} positions"
        raise SpecError("spec.data.options.length", message)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
