"""What is kept: outputs of frozen layers, checkpoints, mirrors, the model."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.conditions import field
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
    """Cache of the output of frozen layers. The first worker of every pipeline keeps it for the next epoch.

    This is the paper's AutoCache (PipeTransformer, section 3.4). A full or broken cache only costs time.
    """

    policy: CachePolicy = Field(
        default=CachePolicy.AUTO,
        description="Auto reads an entry only if measurements show that this is faster than computing it again.",
    )
    memory_bytes: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=2**30, description="Maximum size of the entries in a worker's host memory."
    )
    disk_bytes: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=0,
        description="Maximum size of the entries in files in a worker's TMPDIR. They are read ahead of their use.",
    )
    dtype: CacheDtype | None = Field(
        default=None,
        description="Keeps entries in a smaller type, which changes the loss. By default they keep their own type.",
    )
    offload_frozen: OffloadFrozen = Field(
        default=OffloadFrozen.AUTO,
        description="Auto moves frozen layers to host memory once the caches hold their outputs of a whole epoch. Then"
        " they take no memory of the accelerator, except one layer at a time when a sample is not in the cache. The"
        " host memory is the container's. The result does not change. Never keeps them on the accelerator.",
    )
    rules = (
        Rule(
            field("policy").is_not("Always") | field("memory_bytes").above(0) | field("disk_bytes").above(0),
            "policy Always needs memoryBytes or diskBytes",
            ".policy",
        ),
    )


class Checkpoint(SpecModel):
    """Where checkpoints go: a mounted folder or an fsspec URL that every worker reaches and that outlives them."""

    location: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Absolute path of a mounted volume, or an fsspec URL."
    )
    every_steps: Positive | None = Field(
        default=None,
        description="Steps between checkpoints, in addition to those that a freeze or a resize needs. By default the"
        " measured cost decides. Training then stops for checkpoints at most 1 % of the time, and the storage writes"
        " them at most 10 % of the time. The time between two is at least one minute and at most 30 minutes.",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(default=2, description="Number of newest checkpoints to keep.")
    rules = (IS_A_LOCATION,)


class Mirror(SpecModel):
    """Copies each stage to the next worker's host memory every N steps while there is a single pipeline.

    So a failure costs at most N steps. It needs host memory of twice a stage's state, and briefly four times. With an
    accelerator the memory is pinned, rounded up to powers of two and kept, which may double it."""

    every_steps: Positive = Field(description="Steps between copies. A failure costs at most this many steps.")


class Output(SpecModel):
    """Where results go: the model to `LOCATION/JOB/model`, and on a mounted path the run's record to `LOCATION/JOB`."""

    location: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Absolute path of a mounted volume, or an fsspec URL."
    )
    rules = (IS_A_LOCATION,)
