"""The sections of the spec about stored data: `cache`, `checkpoint`, `mirror` and `output`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.cel import field
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel

from .names import IS_A_LOCATION


class CachePolicy(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class OffloadFrozen(StrEnum):
    AUTO = "Auto"
    NEVER = "Never"


class CacheDtype(StrEnum):
    FLOAT16 = "Float16"
    BFLOAT16 = "BFloat16"


class Cache(SpecModel):
    """The cache for outputs of frozen layers. The first worker of each pipeline keeps them for the next epochs.

    This is AutoCache of the paper PipeTransformer (section 3.4). A full or broken cache only costs time.
    """

    policy: CachePolicy = Field(
        default=CachePolicy.AUTO,
        description="Auto reads an output from the cache only if measurements show that this is faster than to compute"
        " it again. Always reads it even if this is slower. Never: there is no cache.",
    )
    memory_bytes: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=2**30, description="Maximum size of the cache in a worker's host memory, in bytes."
    )
    disk_bytes: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=0,
        description="Maximum size of the cache in files in a worker's TMPDIR, in bytes. Files are read before their"
        " contents are needed.",
    )
    dtype: CacheDtype | None = Field(
        default=None,
        description="Type in which outputs are kept. A smaller type changes the loss. By default they keep their type.",
    )
    offload_frozen: OffloadFrozen = Field(
        default=OffloadFrozen.AUTO,
        description="Auto moves frozen layers to the container's host memory once the caches hold their outputs for a"
        " whole epoch. Then they take no memory of the accelerator, except one layer at a time when a sample is not in"
        " the cache. The results do not change. Never keeps frozen layers on the accelerator.",
    )
    rules = (
        Rule(
            field("policy").is_not("Always") | field("memory_bytes").above(0) | field("disk_bytes").above(0),
            "policy Always needs memoryBytes or diskBytes",
            ".policy",
        ),
    )


class Checkpoint(SpecModel):
    """Where and how often checkpoints are written. All workers must reach the location, and it must outlive them."""

    location: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Absolute path of a mounted volume, or an fsspec URL."
    )
    every_steps: Positive | None = Field(
        default=None,
        description="Number of steps between checkpoints. A freeze or a resize may need further ones. By default the"
        " measured cost decides: training pauses for checkpoints at most 1 % of the time, and the storage writes them"
        " at most 10 % of the time. But the time between two is at least one minute and at most 30 minutes.",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(default=2, description="Number of newest checkpoints to keep.")
    rules = (IS_A_LOCATION,)


class Mirror(SpecModel):
    """While there is a single pipeline, copies each stage to the next worker's host memory every N steps.

    So a failure costs at most N steps. The copies need host memory of twice a stage's state, and for a short time four
    times. With an accelerator this memory is pinned, rounded up to powers of two, and kept, which may double it."""

    every_steps: Positive = Field(
        description="Number of steps between copies. A failure costs at most this many steps."
    )


class Output(SpecModel):
    """Where results are written: the model to `LOCATION/JOB/model`, and on a volume the record to `LOCATION/JOB`."""

    location: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Absolute path of a mounted volume, or an fsspec URL."
    )
    rules = (IS_A_LOCATION,)
