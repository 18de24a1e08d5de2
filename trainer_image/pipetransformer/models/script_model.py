"""Builds a model by a function of the user's program, instead of by a name in the spec."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from pipetransformer.errors import SpecError, building

from .context import MicroBatchContext, set_micro_batch
from .dtype import cast
from .model import PipelineModel
from .randomness.keyed import with_keyed_dropout
from .randomness.seeded import seeded

#: Builds a whole model: a `PipelineModel`, or a list of modules (embedding, layers, head) of a classifier.
ModelFunction = Callable[[], PipelineModel | Sequence[nn.Module]]


class ScriptModel:
    """Calls the user's function with the job's seed set, so that all workers start from the same weights.

    Args:
        build: the user's function. It returns a `PipelineModel`, or a list of modules: embedding, layers, head.
        sample: (1, ...) the input of one sample, to find the shape of activations.
        seed: the seed of all random generators while the function runs.
        dtype: type of all floating-point parameters.
    """

    def __init__(
        self,
        build: ModelFunction,
        sample: Tensor,
        *,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        self._build_function = build
        self._sample = sample
        self._seed = seed
        self._dtype = dtype

    def shell(self) -> PipelineModel:
        """The model with all units on the meta device.

        Raises:
            SpecError: the function failed, or its result is not a model or cannot be copied.
        """
        model = self._build()
        with building("model", "cannot be copied"):
            return model.shell()

    def build_units(self, indices: Collection[int]) -> dict[int, nn.Module]:
        """Build units by index (0 is the embedding, L + 1 the head) with the weights that the function gives them, on
        the CPU."""
        units = self._build().units
        with building("model", "cannot be copied"):
            return {index: copy.deepcopy(units[index]) for index in indices}  # copies: units may share a parameter

    def _build(self) -> PipelineModel:
        with seeded(self._seed), building("model", "cannot be built"):
            model = self._build_function()
            if not isinstance(model, PipelineModel):
                model = self._from_modules(model)
            for unit in model.units:
                cast(unit, self._dtype)
            return with_keyed_dropout(model, seed=self._seed)

    def _from_modules(self, given: object) -> PipelineModel:
        modules = list(given) if isinstance(given, Iterable) else []
        others = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
        if len(modules) < 3 or others:
            found = type(given).__name__
            if isinstance(given, list | tuple):
                found = f"a {found} with a {others[0]}" if others else f"a {found} of {len(modules)}"
            raise SpecError(
                "model",
                "the function must return a PipelineModel or a list of at least three modules (embedding, layers,"
                f" head), not {found}",
            )
        embedding = cast(modules[0], self._dtype).eval()
        lengths = torch.tensor(self._sample.shape[1:2]) if self._sample.dim() > 1 else None
        set_micro_batch(MicroBatchContext(0, (0,), lengths))  # the embedding may ask for it
        with torch.no_grad(), building("model", "the embedding fails on the first sample"):
            activation = embedding(self._sample.clone())  # the embedding may change its input in place
        if not isinstance(activation, Tensor):
            raise SpecError("model", f"the embedding returns a {type(activation).__name__}, not one tensor")
        if activation.shape[:1] != self._sample.shape[:1]:
            shape = tuple(activation.shape)
            raise SpecError("model", f"the embedding returns {shape} for one sample, not (1, ...): samples come first")
        embedding.train()
        return PipelineModel(embedding, modules[1:-1], modules[-1], tuple(activation.shape[1:]))
