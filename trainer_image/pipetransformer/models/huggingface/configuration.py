"""From the job's spec to a configuration of transformers that fits the data, or a `SpecError` that says why not."""

from typing import Any

import transformers

from pipetransformer.data import BYTE_VOCABULARIES, DataInfo, Task
from pipetransformer.errors import SpecError, meant
from pipetransformer.models.architectures import Architecture, find_architecture, registered_for, unsupported
from pipetransformer_contract.spec import Model

from .attention import NAME
from .families import DEFAULT_ARCHITECTURES

#: Tokens of a model of bytes, padded; one that has a tokenizer has thousands.
_MOST_OF_BYTES = 512


def architecture_of(spec: Model) -> Architecture:
    """What the spec names.

    Raises:
        SpecError: an option or the architecture is unknown, or the checkpoint cannot be read.
    """
    return _configured(spec)[1]


def check_before_data(spec: Model, task: Task | None, *, of_bytes: bool) -> Task:
    """Refuse what is wrong whatever the data hold; see `check_model_spec`."""
    config, architecture = _configured(spec)
    _check_task(architecture, task)
    if of_bytes:
        _check_bytes(config, spec)
    model_class_of(architecture)
    return architecture.task


def make_config(spec: Model, info: DataInfo) -> tuple[Any, Architecture]:
    """The configuration of the spec's checkpoint or options, and what to train. What the spec leaves open follows from
    the data.

    Raises:
        SpecError: as `architecture_of`; or an option does not fit the data.
    """
    config, architecture = _configured(spec)
    options = {name: value for name, value in spec.options.items() if name != "model_type"}
    if not spec.path:
        own_names = type(config).attribute_map  # such as n_layer of num_hidden_layers
        open_values = {"num_hidden_layers": spec.num_layers, **_from_data(config, architecture, info)}
        options = {own_names.get(name, name): value for name, value in [*open_values.items(), *options.items()]}
        try:  # anew: one value may follow from another
            config = transformers.AutoConfig.for_model(config.model_type, **options)
        except Exception as error:
            message = f"{type(config).__name__}: {type(error).__name__}: {error}"
            raise SpecError("spec.model.options", message) from error
    else:
        for name, value in options.items():
            setattr(config, name, value)
    _check_task(architecture, info.task)
    if architecture.task is Task.CLASS:  # otherwise every token of the vocabulary would be a label
        if info.num_classes < 1:
            raise SpecError("spec.data", f"does not say how many classes it has, which {architecture.name} must know")
        config.num_labels = info.num_classes
        if info.labels:
            config.id2label = dict(enumerate(info.labels))
            config.label2id = {label: number for number, label in enumerate(info.labels)}
    config._attn_implementation = NAME
    _check(config, architecture, spec, info)
    return config, architecture


def _check_task(architecture: Architecture, task: Task | None) -> None:
    """Refuse targets that a class does not learn; None where nobody says what they are.

    Raises:
        SpecError: naming both.
    """
    if task not in (None, architecture.task):
        raise SpecError(
            "spec.data.options.task",
            f"what samples ask for is {task}, but {architecture.name} learns {architecture.task}: say "
            f"task: {architecture.task}, or name another class in spec.model.architecture",
        )


def _configured(spec: Model) -> tuple[Any, Architecture]:
    """The checkpoint's configuration, or the defaults of a model type."""
    model_type = spec.options.get("model_type")
    named = find_architecture(spec.architecture) if spec.architecture else None
    for each in registered_for(lambda each: each.model_class is not None):
        _introduce(each.model_class)
    if spec.path:
        try:
            config = transformers.AutoConfig.from_pretrained(spec.path)
        except Exception as error:
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
        message = f"{architecture.name} is of the model type {wanted.model_type}, the model of {config.model_type}"
        raise SpecError("spec.model.architecture", message)
    return config, architecture


def _introduce(model_class: Any) -> None:
    """A user's own class of configuration, so that `AutoConfig` knows its model type."""
    own = model_class.config_class
    if own.model_type not in transformers.CONFIG_MAPPING:
        transformers.AutoConfig.register(own.model_type, own)


def _option_names(config: Any) -> list[str]:
    return [*config.to_dict(), *type(config).attribute_map]


def _default_architecture(config: Any) -> Architecture:
    """What a model type is trained as where the job does not say it.

    Raises:
        SpecError: no architecture of the type is known, or several.
    """
    default = DEFAULT_ARCHITECTURES.get(config.model_type)
    if default is not None:
        return find_architecture(default)
    found = registered_for(lambda each: config_class_of(each) is type(config))
    if len(found) == 1:
        return found[0]
    field = "spec.model.architecture"
    if found:
        names = ", ".join(each.name for each in found)
        raise SpecError(field, f"say which of {names} to train: all are of the model type {config.model_type}")
    saved = getattr(config, "architectures", None) or [config.model_type]
    raise SpecError(field, unsupported(saved[0]))


def model_class_of(architecture: Architecture) -> Any:
    """The class, of transformers or a user's own.

    Raises:
        SpecError: transformers has none of this name, or one that takes no attention of ours.
    """
    found: Any = architecture.model_class or getattr(transformers, architecture.name, None)
    if found is None:
        raise SpecError(
            "spec.model.architecture", f"transformers {transformers.__version__} has no {architecture.name}"
        )
    if not found._supports_attention_backend:
        raise SpecError(
            "spec.model.architecture",
            f"{architecture.name} computes attention by code of its own: neither lengths of samples nor the keys of "
            "dropout can reach it",
        )
    return found


def config_class_of(architecture: Architecture) -> Any:
    """Of a registered class, None where transformers has no such class."""
    found: Any = architecture.model_class or getattr(transformers, architecture.name, None)
    return getattr(found, "config_class", None)


def _from_data(config: Any, architecture: Architecture, info: DataInfo) -> dict[str, Any]:
    if hasattr(config, "image_size") and len(info.input_shape) == 3:
        channels, height, width = info.input_shape
        return {"num_channels": channels, "image_size": height if height == width else (height, width)}
    if hasattr(config, "vocab_size") and info.vocab_size:
        # The library's defaults are ids of its own vocabularies. A row of padding never trains: packed samples of a
        # language model have no padding, but its tokenizer may call the end of a text so.
        pad = None if architecture.task is Task.NEXT_TOKEN else info.pad_id
        ids = {"pad_token_id": pad, "bos_token_id": info.start_id, "eos_token_id": info.end_id}
        return {"vocab_size": info.vocab_size, **ids}
    return {}


def _check(config: Any, architecture: Architecture, spec: Model, info: DataInfo) -> None:
    if config.num_hidden_layers != spec.num_layers:
        raise SpecError(
            "spec.model.numLayers", f"is {spec.num_layers}, but the model has {config.num_hidden_layers} blocks"
        )
    wants_tokens = not hasattr(config, "image_size")
    if wants_tokens != bool(info.vocab_size):
        kind = "tokens" if wants_tokens else "images"
        raise SpecError("spec.data.name", f"{config.model_type} needs {kind}, not samples of {info.input_shape}")
    if not wants_tokens:
        shape = (config.num_channels, *_pair(config.image_size))
        if shape != info.input_shape:
            raise SpecError(
                "spec.model.options.image_size", f"the model takes {shape}, the data has {info.input_shape}"
            )
        return
    if info.vocab_size in BYTE_VOCABULARIES:
        _check_bytes(config, spec)
    if config.vocab_size < info.vocab_size:
        raise SpecError(
            "spec.model.options.vocab_size", f"{config.vocab_size} tokens, but the data has {info.vocab_size}"
        )
    _check_length(config, architecture, info.input_shape[0])


def _check_bytes(config: Any, spec: Model) -> None:
    """Refuse bytes as tokens of a pretrained model that has a tokenizer.

    Raises:
        SpecError: naming the tokenizer's option.
    """
    if spec.path and config.vocab_size > _MOST_OF_BYTES:
        raise SpecError(
            "spec.data.options.tokenizer",
            f"samples are bytes, but {spec.path} was trained on {config.vocab_size} tokens of its own: "
            "name its tokenizer, with the dataset huggingface",
        )


def _check_length(config: Any, architecture: Architecture, length: int) -> None:
    try:
        first = architecture.first_position(config)
    except TypeError as error:
        if config.pad_token_id is not None:
            raise
        raise SpecError(
            "spec.data.options.tokenizer",
            f"{architecture.name} counts positions by the token of padding, and the data have none: use a tokenizer "
            "that has one, or say pad_id in DataInfo",
        ) from error
    rows = getattr(config, "max_position_embeddings", None)  # which not every family has
    if rows is not None and rows - first < length:
        message = f"samples of {length} tokens, but the model has {rows - first} positions"
        raise SpecError("spec.data.options.length", message)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
