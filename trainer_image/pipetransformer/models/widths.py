"""The sizes that shrink together in a narrower model: number of heads, hidden size and MLP size. A head keeps its
size."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipetransformer.data import DataInfo
from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import Model

from .build import HUGGINGFACE, VIT, import_huggingface


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a model.

    Attributes:
        model: `vit`, or the name of a class of transformers.
        sizes: the sizes that shrink, by field of the spec, or by name in the configuration of transformers.
        heads: number of attention heads of queries.
        key_heads: number of attention heads of keys and values.
    """

    model: str
    sizes: Mapping[str, int]
    heads: int
    key_heads: int


def widths_of(spec: Model, info: DataInfo) -> Widths | None:
    """The widths of the model of a spec; None for a model of the user's own code, whose sizes are unknown."""
    if spec.name == HUGGINGFACE:
        model, sizes = import_huggingface().widths(spec, info)
        heads = sizes.get("num_attention_heads", 1)
        return Widths(model, sizes, heads, sizes.get("num_key_value_heads", heads))
    if spec.name != VIT:
        return None
    sizes = {"hidden_size": spec.hidden_size, "num_heads": spec.num_heads, "mlp_size": spec.mlp_size}
    return Widths(VIT, sizes, spec.num_heads, spec.num_heads)


def narrowed(spec: Model, widths: Widths, factor: int) -> Model:
    """The spec of a narrower model.

    Args:
        spec: the spec of the model.
        widths: the widths of the model.
        factor: the widths are divided by this.

    Raises:
        SpecError: a size is not a multiple of `factor`.
    """
    for name, size in widths.sizes.items():
        if size % factor:
            raise SpecError(
                "spec.multiLevel.widthFactor",
                f"{widths.model} has {name} {size}, which cannot be divided by {factor} for the smallest level: lower"
                " widthFactor or levels",
            )
    sizes = {name: size // factor for name, size in widths.sizes.items()}
    return spec.model_copy(update=sizes if spec.name == VIT else {"options": {**spec.options, **sizes}})
