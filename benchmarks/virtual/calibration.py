"""What the units of a virtual model cost: declared times from a file, made longer by a factor.

The default file has round numbers. `python3 -m benchmarks.worth.gpu` writes one that was measured on a GPU.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

DEFAULT = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of one unit.

    A forward of a micro-batch takes `fixed + samples * (per_sample + per_token * l + per_pair * l * (c + l / 2))`: l
    tokens of each sample, with c earlier ones that they attend to. Each slice of a sample pays `fixed` and
    `per_sample`. Halves of a backward are multiples of that; a whole backward takes both.
    """

    fixed: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def forward(self, samples: int, tokens: int = 0, context: int = 0) -> float:
        """Seconds of the forward of `tokens` tokens of each sample after `context` earlier ones."""
        of_sample = self.per_sample + self.per_token * tokens + self.per_pair * tokens * (context + tokens / 2)
        return self.fixed + samples * of_sample

    def times(self, factor: float) -> "UnitTimes":
        """The same unit, `factor` times as slow."""
        return replace(
            self,
            fixed=factor * self.fixed,
            per_sample=factor * self.per_sample,
            per_token=factor * self.per_token,
            per_pair=factor * self.per_pair,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of model: what its ends and layers cost.

    Attributes:
        layer: the first layer.
        growth: time of each further layer relative to the one before.
    """

    embedding: UnitTimes = field(default_factory=UnitTimes)
    layer: UnitTimes = field(default_factory=UnitTimes)
    head: UnitTimes = field(default_factory=UnitTimes)
    growth: float = 1.0

    def units(self, layers: int, dilate: float = 1.0) -> list[UnitTimes]:
        """Embedding, layers and head, `dilate` times as slow."""
        inner = [self.layer.times(self.growth**index) for index in range(layers)]
        return [unit.times(dilate) for unit in (self.embedding, *inner, self.head)]


_PROFILES = TypeAdapter(dict[str, Profile])


def profile(name: str = "even", file: Path | str = DEFAULT) -> Profile:
    """The profile of this name in the file's `units`.

    Raises:
        ValueError: the file has no such profile.
    """
    known = _PROFILES.validate_python(json.loads(Path(file).read_text())["units"])
    if name not in known:
        raise ValueError(f"{file} has no profile {name!r}. It has {', '.join(known)}")
    return known[name]
