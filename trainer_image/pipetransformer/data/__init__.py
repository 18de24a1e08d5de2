"""Which samples a step sees and what they are: datasets, an epoch's order, the dealing of a batch to pipelines."""

from .dataset import DataInfo, Dataset, PaddedSplit, Split, TensorSplit, lengths_of
from .digest import digest
from .load import load_dataset
from .micro_batches import MicroBatch, deal, default_micro_batch_size, shards_of
from .order import EpochOrder
from .own import own_dataset

__all__ = [
    "DataInfo",
    "Dataset",
    "EpochOrder",
    "MicroBatch",
    "PaddedSplit",
    "Split",
    "TensorSplit",
    "deal",
    "default_micro_batch_size",
    "digest",
    "lengths_of",
    "load_dataset",
    "own_dataset",
    "shards_of",
]
