"""Which axes of each parameter become narrower on a smaller level, for each family of models whose width may change.

A family's table maps a pattern of parameter names inside a unit to one letter for each axis of the parameter:

    .   keeps its size: classes, vocabulary, positions, pixels
    w   an output axis, or the axis of something that is added to an output
    r   an input axis: it is multiplied with an input
    3   an output axis with query, key and value side by side
    k   an output axis of the heads of keys and values, which may be fewer than those of queries
    n   an output axis of the final norm
    o   the input axis of the layer that makes the logits from the final norm's output

If embedding and output layer share a table, its axis `o` must be an output axis, as in the embedding. Logits would then
grow with the width. So the final norm's gain and bias are scaled, and the model still computes the same function.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipetransformer_contract.spec import Grouping

from .operators import Axes, Axis, Groups


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models whose parameters have the same names.

    Attributes:
        table: the letters of a parameter's axes (see the module), by a regular expression for its name inside its unit.
    """

    table: Mapping[str, str]
    _patterns: dict[str, re.Pattern[str]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_patterns", {text: re.compile(text) for text in self.table})

    def letters(self, name: str) -> str | None:
        """The letters of the axes of the parameter `name` (inside its unit); None if no pattern matches."""
        return next((self.table[text] for text, pattern in self._patterns.items() if pattern.fullmatch(name)), None)


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of the larger of two levels.

    Attributes:
        queries: number of heads of queries.
        keys: number of heads of keys and values.
        shared_table: whether embedding and output layer share a table.
    """

    queries: int
    keys: int
    shared_table: bool

    def axes(self, letters: str, groups: Groups) -> Axes:
        """The axes that these letters stand for, one for each letter."""
        return [self._axis(letter, groups) for letter in letters]

    def _axis(self, letter: str, groups: Groups) -> Axis | None:
        if letter == ".":
            return None
        blocks = self.keys if letter == "k" else self.queries
        if groups.grouping is Grouping.HALVES:
            blocks = groups.factor  # merging halves of the heads merges halves of the axis
        reads = letter == "r" or (letter == "o" and not self.shared_table)
        return Axis(blocks, reads=reads, parts=3 if letter == "3" else 1)


def _linear(name: str, weight: str = "wr") -> dict[str, str]:
    """Linear layers with an optional bias. A weight has two axes: outputs, then inputs."""
    return {rf"({name})\.weight": weight, rf"({name})\.bias": weight[0]}


def _conv1d(name: str, output: str = "w") -> dict[str, str]:
    """GPT-2's linear layers, whose weights have inputs first, then outputs."""
    return {rf"({name})\.weight": f"r{output}", rf"({name})\.bias": output}


def _norm(name: str, letter: str = "w") -> dict[str, str]:
    return {rf"({name})\.(weight|bias)": letter}


_VIT = Family(
    {
        **_linear("projection", "w."),
        "positions": ".w",
        **_norm("norm[12]"),
        **_linear(r"attn\.qkv", "3r"),
        **_linear(r"attn\.projection|mlp\.[02]"),
        **_norm("norm", "n"),
        **_linear("classifier", ".o"),
    }
)
_TRANSFORMERS_VIT = Family(
    {
        r"cls_token|position_embeddings": "..w",
        r"patch_embeddings\.projection\.weight": "w...",
        r"patch_embeddings\.projection\.bias": "w",
        **_norm("layernorm_before|layernorm_after"),
        **_linear(r"attention\.[qkvo]_proj|mlp\.fc[12]"),
        **_norm("norm", "n"),
        **_linear("classifier", ".o"),
    }
)
_BERT = Family(
    {
        r"(word|position|token_type)_embeddings\.weight": ".w",
        **_norm("LayerNorm"),
        **_linear(r"attention\.self\.(query|key|value)|attention\.output\.dense|(intermediate|output)\.dense"),
        **_norm(r"(attention\.)?output\.LayerNorm"),
        **_linear(r"pooler\.dense|predictions\.transform\.dense"),
        **_norm(r"predictions\.transform\.LayerNorm", "n"),
        **_linear(r"classifier|predictions\.decoder", ".o"),
        r"predictions\.bias": ".",
    }
)
_GPT2 = Family(
    {
        r"(tokens|positions)\.weight": ".w",
        **_norm("ln_[12]"),
        **_conv1d(r"attn\.c_attn", "3"),
        **_conv1d(r"attn\.c_proj|mlp\.c_fc|mlp\.c_proj"),
        **_norm("norm", "n"),
        **_linear("output", ".o"),
    }
)
_LLAMA = Family(
    {
        "weight": ".w",
        **_norm(r"layer\.(input|post_attention)_layernorm"),
        **_linear(r"layer\.self_attn\.[kv]_proj", "kr"),
        **_linear(r"layer\.self_attn\.[qo]_proj|layer\.mlp\.(gate|up|down)_proj"),
        **_norm("norm", "n"),
        **_linear("output", ".o"),
    }
)

#: The families, by the name of our model or of a class of transformers.
FAMILIES = {
    "vit": _VIT,
    "ViTForImageClassification": _TRANSFORMERS_VIT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _LLAMA,
}


def family_of(model: str) -> Family | None:
    """The family of a model; None if its width cannot change, because no family has its parameters.

    Args:
        model: `vit`, or the name of a class of transformers.
    """
    return FAMILIES.get(model)
