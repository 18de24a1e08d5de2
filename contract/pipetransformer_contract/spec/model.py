"""The sections `model` and `data` of the spec."""

from typing import Annotated, Any

from pydantic import Field
from pydantic.alias_generators import to_camel

from pipetransformer_contract.cel import field
from pipetransformer_contract.spec_model import Rule, SpecModel

from .names import SCRIPT, ImportPath, known_or_imported

#: The fields that only `vit` reads, with their defaults.
_OF_VIT: dict[str, Any] = {"hidden_size": 64, "num_heads": 4, "mlp_size": 128, "patch_size": 2, "dropout": 0.0}


class Model(SpecModel):
    """The model to train. Fields marked `vit` apply only to the built-in model of that name."""

    name: ImportPath = Field(
        description="`vit`, `huggingface`, module:function of a model in the trainer's image, or `script` if the"
        " program passes the model."
    )
    path: Annotated[str, Field(max_length=4096)] = Field(
        default="",
        description="For `huggingface`: folder or hub id of pretrained weights. If empty, the weights are initialized"
        " at random, and `options` is the configuration.",
    )
    architecture: Annotated[str, Field(max_length=253)] = Field(
        default="",
        description="For `huggingface`: name of a class of transformers, such as `GPT2LMHeadModel`, or module:function"
        " of an architecture that the trainer's image registers. By default it follows from the model's type.",
    )
    num_layers: Annotated[int, Field(ge=1, le=4096)] = Field(default=12, description="Number of layers of the model.")
    hidden_size: Annotated[int, Field(ge=1, le=1048576)] = Field(
        default=_OF_VIT["hidden_size"], description="Width of a layer (`vit`)."
    )
    num_heads: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=_OF_VIT["num_heads"], description="Attention heads (`vit`)."
    )
    mlp_size: Annotated[int, Field(ge=1, le=4194304)] = Field(
        default=_OF_VIT["mlp_size"], description="Width of the MLP's hidden layer (`vit`)."
    )
    patch_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=_OF_VIT["patch_size"], description="Side of a patch in pixels (`vit`)."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=_OF_VIT["dropout"], description="Dropout probability (`vit`)."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments for a model that is named as module:function. For `huggingface`: its"
        " configuration, including `model_type`.",
    )
    rules = (
        Rule(
            known_or_imported("name", ("vit", "huggingface", SCRIPT)),
            "unknown model: use vit, huggingface, module:function of a model in the trainer's image, or script",
            ".name",
        ),
        Rule(
            field("name").is_("huggingface") | (field("path").is_("") & field("architecture").is_("")),
            "path and architecture are for the model huggingface",
            ".name",
        ),
        *(
            Rule(
                field("name").is_("vit") | field(name).is_(default),
                f"only vit has {to_camel(name)}: use options for another model",
                f".{to_camel(name)}",
            )
            for name, default in _OF_VIT.items()
        ),
        Rule(
            (field("hidden_size") % field("num_heads")).is_(0),
            "hiddenSize must be a multiple of numHeads",
            ".hiddenSize",
        ),
    )


class Data(SpecModel):
    """The dataset that the job trains and evaluates on."""

    name: ImportPath = Field(
        description="`digits`, `text`, `huggingface`, module:function of data in the trainer's image, or `script` if"
        " the program passes the data."
    )
    path: Annotated[str, Field(max_length=4096)] = Field(
        default="",
        description="Folder or file that the dataset reads. For `huggingface` also a hub id, or a CSV, TSV, JSON lines"
        " or Parquet file.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the function that loads the data."
    )
    loader_processes: Annotated[int, Field(ge=0, le=256)] = Field(
        default=0,
        description="Number of processes by which each worker reads the samples of its next steps during a step. They"
        " help if samples are decoded or tokenized when they are read. Each process needs a CPU and a copy of the"
        " dataset object, and does not use /dev/shm. With 0 the worker reads samples within the step.",
    )
    rules = (
        Rule(
            known_or_imported("name", ("digits", "text", "huggingface", SCRIPT)),
            "unknown dataset: use digits, text, huggingface, module:function of data in the trainer's image, or script",
            ".name",
        ),
    )
