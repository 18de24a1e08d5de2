"""From the job's spec to a configuration of transformers that fits the data, or a `SpecError` that says why not."""

from typing import Any

import transformers

from pipetransformer_contract.spec import Model

from ...data import BYTE_VOCABULARIES, DataInfo
from ...errors import SpecError
from .attention import NAME
from .families import DEFAULT_ARCHITECTURES, known_architectures, task_of

#: Tokens of a model of bytes, padded; one that has a tokenizer has thousands.
_MOST_OF_BYTES = 512


def make_config(spec: Model, info: DataInfo) -> tuple[Any, str]:
    """The configuration of the spec's checkpoint or options, and the name of the class to train. What the spec leaves
    open follows from the data.

    Raises:
        SpecError: an option is unknown or does not fit the data, or the checkpoint cannot be read.
    """
    options = dict(spec.options)
    model_type = options.pop("model_type", None)
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
            f"{model_type!r} is no model type of transformers: use one of {known}, or name a checkpoint in path",
        )
    architecture = _architecture(spec, config)
    for name in options:
        if not hasattr(config, name):
            known = (
                "; it is one of its rope_parameters" if name in (getattr(config, "rope_parameters", None) or ()) else ""
            )
            raise SpecError(f"spec.model.options.{name}", f"{type(config).__name__} has no {name}{known}")
    if not spec.path:
        own_names = type(config).attribute_map  # such as n_layer of num_hidden_layers
        open_values = {"num_hidden_layers": spec.num_layers, **_from_data(config, info)}
        options = {own_names.get(name, name): value for name, value in [*open_values.items(), *options.items()]}
        try:  # anew: one value may follow from another
            config = transformers.AutoConfig.for_model(model_type, **options)
        except Exception as error:
            message = f"{type(config).__name__}: {type(error).__name__}: {error}"
            raise SpecError("spec.model.options", message) from error
    else:
        for name, value in options.items():
            setattr(config, name, value)
    if info.task not in (None, task := task_of(architecture)):
        raise SpecError(
            "spec.data.options.task",
            f"what samples ask for is {info.task}, but {architecture} learns {task}: say task: {task}, "
            "or name another class in spec.model.architecture",
        )
    if "Classification" in architecture:  # else it would name every token of the vocabulary a label
        if info.num_classes < 1:
            raise SpecError("spec.data", f"does not say how many classes it has, which {architecture} must know")
        config.num_labels = info.num_classes
    config._attn_implementation = NAME
    _check(config, spec, info)
    return config, architecture


def _architecture(spec: Model, config: Any) -> str:
    name = spec.architecture or DEFAULT_ARCHITECTURES.get(config.model_type)
    if name not in known_architectures():
        known = ", ".join(known_architectures())
        raise SpecError("spec.model.architecture", f"{name or config.model_type} is none of {known}")
    return name


def positions(config: Any, info: DataInfo) -> int:
    """Positions of the hidden states of one sample."""
    if not info.vocab_size:
        height, width = _pair(config.image_size)
        patch_height, patch_width = _pair(config.patch_size)
        return (height // patch_height) * (width // patch_width) + 1  # and the class token
    return info.input_shape[0]


def _from_data(config: Any, info: DataInfo) -> dict[str, Any]:
    if hasattr(config, "image_size") and len(info.input_shape) == 3:
        channels, height, width = info.input_shape
        return {"num_channels": channels, "image_size": height if height == width else (height, width)}
    if hasattr(config, "vocab_size") and info.vocab_size:
        # The library's defaults are ids of its own vocabularies.
        return {"vocab_size": info.vocab_size, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return {}


def _check(config: Any, spec: Model, info: DataInfo) -> None:
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
    if spec.path and info.vocab_size in BYTE_VOCABULARIES and config.vocab_size > _MOST_OF_BYTES:
        raise SpecError(
            "spec.data.options.tokenizer",
            f"samples are bytes, but {spec.path} was trained on {config.vocab_size} tokens of its own: "
            "name its tokenizer, with the dataset huggingface",
        )
    if config.vocab_size < info.vocab_size:
        raise SpecError(
            "spec.model.options.vocab_size", f"{config.vocab_size} tokens, but the data has {info.vocab_size}"
        )
    if config.max_position_embeddings < info.input_shape[0]:
        raise SpecError(
            "spec.data.options.length",
            f"samples of {info.input_shape[0]} tokens, but the model has {config.max_position_embeddings} positions",
        )


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
