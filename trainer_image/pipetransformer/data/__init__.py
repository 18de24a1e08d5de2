"""Which samples a step sees and what they are: datasets, an epoch's order, the dealing of a batch to pipelines."""

from .dataset import (
    AugmentedSplit,
    DataInfo,
    Dataset,
    PaddedLengths,
    PaddedSplit,
    Processor,
    Split,
    Task,
    TensorSplit,
    augmentation_key,
    lengths_of,
    padded_lengths,
    read_batch,
)
from .digest import digest, inputs_change
from .load import load_dataset
from .micro_batches import MicroBatch, deal, default_micro_batch_size, pipelines_of, shards_of, weights_of
from .order import EpochOrder
from .own import own_dataset
from .readers import Readers, Wanted, importing_main
from .tokens import BYTE_VOCABULARIES

__all__ = [
    "BYTE_VOCABULARIES",
    "AugmentedSplit",
    "DataInfo",
    "Dataset",
    "EpochOrder",
    "MicroBatch",
    "PaddedLengths",
    "PaddedSplit",
    "Processor",
    "Readers",
    "Split",
    "Task",
    "TensorSplit",
    "Wanted",
    "augmentation_key",
    "deal",
    "default_micro_batch_size",
    "digest",
    "importing_main",
    "inputs_change",
    "lengths_of",
    "load_dataset",
    "own_dataset",
    "padded_lengths",
    "pipelines_of",
    "read_batch",
    "shards_of",
    "weights_of",
]
