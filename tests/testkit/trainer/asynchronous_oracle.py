"""Asynchronous training in numpy: own forwards, backwards, optimizers and predictions, and a closed form of staleness.

It imports nothing of ours except the arrays of the model and of the samples, and knows neither lists nor executors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Weight:
    """An array that trains, with what its optimizer remembers.

    Attributes:
        options: of the optimizer, by the spec's names.
    """

    value: Array
    options: Mapping[str, Any]
    steps: int = 0
    first: Array | float = 0.0
    second: Array | float = 0.0
    gradient: Array | float = 0.0

    def step(self, gradient: Array, rate: float) -> "Weight":
        """The weight after one more step."""
        name, decay = self.options["name"], self.options.get("weightDecay", 0.0)
        beta1, beta2 = self.options.get("beta1", 0.9), self.options.get("beta2", 0.999)
        value, steps = self.value, self.steps + 1
        first, second = self.first, self.second
        if name == "AdamW":
            value = value - rate * decay * value
        else:
            gradient = gradient + decay * value
        if name in ("Adam", "AdamW"):
            first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        elif name == "RMSprop":
            alpha = self.options.get("alpha", 0.99)
            second = alpha * second + (1 - alpha) * gradient**2
        else:
            first = self.options.get("momentum", 0.9) * first + gradient
        after = Weight(value, self.options, steps, first, second, gradient)
        after.value = value - rate * after.direction
        return after

    @property
    def direction(self) -> Any:
        """What the last step moved the value by, over the rate and without decoupled decay; 0 before the first."""
        if not self.steps:
            return 0.0
        epsilon: float = self.options.get("epsilon", 1e-8)
        match self.options["name"]:
            case "Adam" | "AdamW":
                beta1, beta2 = self.options.get("beta1", 0.9), self.options.get("beta2", 0.999)
                mean = self.first / (1 - beta1**self.steps)
                return np.divide(mean, np.sqrt(self.second / (1 - beta2**self.steps)) + epsilon)
            case "RMSprop":
                return np.divide(self.gradient, np.sqrt(self.second) + epsilon)
        return self.first


@dataclass
class Stage:
    """Units of one stage, and what they were after each step of the present round."""

    units: Sequence[int]
    versions: list[list[Weight]] = field(default_factory=list)

    def predicted(self, version: int, factor: float) -> list[Array]:
        """The arrays after `version` steps of the round, moved on by `factor` times their direction."""
        return [each.value - factor * each.direction for each in self.versions[version]]

    @property
    def newest(self) -> list[Array]:
        return [each.value for each in self.versions[-1]]


def train(
    arrays: Sequence[tuple[Array, Array]],
    spans: Sequence[range],
    rounds: Sequence[Sequence[Sequence[tuple[Array, Array]]]],
    rates: Sequence[float],
    options: Mapping[str, Any],
) -> list[float]:
    """Mean loss of each step.

    Args:
        arrays: weight and bias of each unit: the embedding, layers, the head.
        spans: units of each stage.
        rounds: of each round its steps, of these their micro-batches: inputs and targets.
        rates: learning rate of each step.
        options: of the optimizer.
    """
    stages = [Stage(span, [[Weight(a, options) for unit in span for a in arrays[unit]]]) for span in spans]
    losses: list[float] = []
    for steps in rounds:
        for stage in stages:
            stage.versions = stage.versions[-1:]
        number = 0
        for step, micro_batches in enumerate(steps):
            rate = rates[len(losses)]
            sums = [[np.zeros_like(value) for value in stage.newest] for stage in stages]
            loss = samples = 0.0
            for inputs, targets in micro_batches:
                used = []
                for k, stage in enumerate(stages):
                    # K - k forwards come first, then a backward before each; a step after the last of each step's.
                    back = max(0, number - (len(stages) - k) + 1)
                    version = sum(back >= sum(map(len, steps[: end + 1])) for end in range(len(steps)))
                    used.append(stage.predicted(version, rate * (step - version)))
                part, gradients = _gradients(stages, used, inputs, targets)
                loss, samples = loss + part, samples + len(inputs)
                for own, more in zip(sums, gradients, strict=True):
                    for total, one in zip(own, more, strict=True):
                        total += one
                number += 1
            for stage, own in zip(stages, sums, strict=True):
                stage.versions.append(
                    [each.step(one / samples, rate) for each, one in zip(stage.versions[-1], own, strict=True)]
                )
            losses.append(loss / samples)
    return losses


def _gradients(
    stages: Sequence[Stage], used: Sequence[list[Array]], x: Array, targets: Array
) -> tuple[float, list[list[Array]]]:
    """Summed loss, and gradients by stage: forward by the arrays `used`, products of the backward by the newest."""
    last = stages[-1].units[-1]
    kept: list[list[tuple[Array, Array]]] = []
    for stage, arrays in zip(stages, used, strict=True):
        kept.append([])
        for place, unit in enumerate(stage.units):
            y = x @ arrays[2 * place] + arrays[2 * place + 1]
            kept[-1].append((x, np.tanh(y)))
            x = y if unit in (0, last) else x + np.tanh(y)
    difference = x - targets
    upstream = 2 * difference
    found: list[list[Array]] = []
    for stage, seen in zip(reversed(stages), reversed(kept), strict=True):
        own: list[Array] = []
        for place, unit in reversed(list(enumerate(stage.units))):
            before, bent = seen[place]
            inner = upstream if unit in (0, last) else upstream * (1 - bent**2)
            own = [before.T @ inner, inner.sum(0), *own]
            down = inner @ stage.newest[2 * place].T
            upstream = down if unit in (0, last) else upstream + down
        found.insert(0, own)
    return float((difference**2).sum()), found
