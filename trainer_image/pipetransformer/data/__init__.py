"""Samples: datasets, the order of an epoch, and how a global batch is divided among the pipelines."""

from .dataset import (
    NO_TARGET,
    AugmentedSplit,
    DataInfo,
    Dataset,
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
from .digest import as_bytes, byte_tensor, digest
from .load import check_data_spec, load_dataset, makes_bytes, task_before_reading
from .order import Dealer, EpochOrder, MicroBatch, deal, default_micro_batch_size, shards_of, weights_of
from .readers import Readers, Wanted, importing_main
from .script_data import Table, script_dataset
from .tokens import BYTE_VOCABULARIES

__all__ = [
    "BYTE_VOCABULARIES",
    "NO_TARGET",
    "AugmentedSplit",
    "DataInfo",
    "Dataset",
    "Dealer",
    "EpochOrder",
    "MicroBatch",
    "PaddedSplit",
    "Processor",
    "Readers",
    "Split",
    "Table",
    "Task",
    "TensorSplit",
    "Wanted",
    "as_bytes",
    "augmentation_key",
    "byte_tensor",
    "check_data_spec",
    "deal",
    "default_micro_batch_size",
    "digest",
    "importing_main",
    "lengths_of",
    "load_dataset",
    "makes_bytes",
    "padded_lengths",
    "read_batch",
    "script_dataset",
    "shards_of",
    "task_before_reading",
    "weights_of",
]
