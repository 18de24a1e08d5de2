"""Checkpoints, one file a unit, so that any number of stages and pipelines can load what it needs of them.

`LOCATION/step-000000000120-g3-1f0c9a52/` holds `embedding.safetensors`, `blocks.0.safetensors`, ... and, written last,
`DONE.json`. Without that marker, or the files that it lists, the folder does not count. Every owner of a unit calls
`save_unit`; when all have, one worker calls `commit`. The layout generation is part of the folder's name, so a worker
of an older generation that is late can spoil nothing; and so is the generation's nonce (not in those of older
releases), so two jobs that begin here at the same time never write into one folder. A job at a location that has been
used counts on from there.
"""

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from pydantic import ConfigDict, Field
from safetensors import SafetensorError
from torch import Tensor

from pipetransformer.errors import StaleCheckpointError
from pipetransformer.models import unit_name
from pipetransformer_contract.wire import Wire

from .files import Folder

logger = logging.getLogger(__name__)

MARKER = "DONE.json"
_UNIT = ".safetensors"
#: After the name of a tensor that the format does not know: it is written as pairs of real numbers.
_COMPLEX = "@complex128"
#: In the marker, besides what `CheckpointInfo` says: bytes of each unit's file.
_FILES = "files"
#: A client of NFS may keep a folder's listing for 60 s.
_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.5
#: What we write, and nothing that a user has renamed or copied.
_FOLDER = re.compile(r"^step-(\d+)-g(\d+)(?:-[0-9a-f]{8})?$")


class CheckpointInfo(Wire):
    """The marker of a durable checkpoint: where training stands, for any layout that loads it.

    `min_stages` is the pipeline that a restart begins with, `num_shards` C of the order of its data. `state` is
    what besides tensors was committed (policy state, best metric), JSON-able but for what is no number. `run` is what a
    run that goes on from it must have in common with the one that wrote it. `nonce` is the generation's; empty in
    those of older releases.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: int
    boundary: int
    layout_generation: int
    nonce: str = ""
    num_layers: int
    min_stages: int = 1
    num_shards: int = 1
    state: dict[str, Any] = Field(default_factory=dict)
    run: dict[str, Any] = Field(default_factory=dict)

    @property
    def folder(self) -> str:
        writer = f"-{hashlib.sha256(self.nonce.encode()).hexdigest()[:8]}" if self.nonce else ""
        return f"step-{self.step:012d}-g{self.layout_generation}{writer}"


def save_unit(location: str, info: CheckpointInfo, unit: str, tensors: Mapping[str, Tensor]) -> int:
    """Write one unit's committed tensors (parameters, buffers, optimizer state) of `info` and return their bytes.

    Names are free; the unit is as `PipelineModel.unit_name` calls it. The checkpoint counts only after `commit`.
    """
    content = to_bytes(tensors)
    Folder(location).write(f"{info.folder}/{unit}{_UNIT}", content)
    return len(content)


def to_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file. One tensor under two names, such as a weight that two modules of a unit share, is written
    twice: the format knows no sharing. `from_bytes` reads it."""
    content: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in tensors.items():
        on_host = tensor.detach().contiguous().cpu()
        if on_host.dtype is torch.complex128:
            name, on_host = name + _COMPLEX, torch.view_as_real(on_host)
        content[name] = on_host.clone() if on_host.data_ptr() in written else on_host
        written.add(on_host.data_ptr())
    return safetensors.torch.save(content, metadata)


def from_bytes(content: bytes) -> dict[str, Tensor]:
    """What `to_bytes` was given, on the CPU.

    Raises:
        SafetensorError: it is damaged.
    """
    return {
        name.removesuffix(_COMPLEX): torch.view_as_complex(tensor) if name.endswith(_COMPLEX) else tensor
        for name, tensor in safetensors.torch.load(content).items()
    }


def commit(location: str, info: CheckpointInfo, *, keep: int = 2, patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Make a checkpoint count, once every unit of it is saved, and remove all but the `keep` newest.

    Args:
        location: that every unit was saved at.
        info: of the checkpoint.
        keep: how many to keep.
        patience_seconds: that the file of a unit may take to be seen here after it was written elsewhere.

    Raises:
        FileNotFoundError: a unit's file is not there: somebody writes to another place under the same name.
        StaleCheckpointError: a higher layout generation, or one of this number of another job's, has a durable
            checkpoint.
    """
    root = Folder(location)
    newest = latest(location)
    if newest is not None and newest.layout_generation > info.layout_generation:
        raise StaleCheckpointError(
            f"{location}: generation {newest.layout_generation} wrote step {newest.step}; "
            f"generation {info.layout_generation} may not replace it with step {info.step}"
        )
    if newest is not None and newest.layout_generation == info.layout_generation and newest.nonce != info.nonce:
        raise StaleCheckpointError(
            f"{location}: another run, which began here at the same time, wrote {newest.folder}; "
            f"{info.folder} does not count: give each run a location of its own"
        )
    marker = info.to_wire() | {_FILES: _sizes_of_all(root, info, patience_seconds)}
    root.write(f"{info.folder}/{MARKER}", json.dumps(marker).encode())
    try:
        _prune(root, keep)
    except OSError as error:  # what counts is durable, and the next one prunes again
        logger.warning("%s: older checkpoints cannot be removed: %s", location, error)


def latest(location: str) -> CheckpointInfo | None:
    """The newest durable checkpoint: highest layout generation first, then highest step. None when there is none."""
    root = Folder(location)
    return next((info for name in _newest_first(root) if (info := _durable(root, name)) is not None), None)


def newest_generation(location: str) -> int:
    """The highest layout generation that has left anything, finished or not; 0 for none."""
    return max((int(match[2]) for name in Folder(location).names() if (match := _FOLDER.match(name))), default=0)


def find(location: str, folder: str) -> CheckpointInfo | None:
    """The durable checkpoint in `folder`, as `CheckpointInfo.folder` called it; None when it is not there."""
    return _durable(Folder(location), folder)


def load_unit(location: str, info: CheckpointInfo, unit: str) -> dict[str, Tensor]:
    """What `save_unit` was given for this unit, on the CPU.

    Raises:
        OSError: the checkpoint lacks the unit, or what it has is damaged.
    """
    name = f"{info.folder}/{unit}{_UNIT}"
    try:
        return from_bytes(Folder(location).read(name))
    except SafetensorError as error:
        raise OSError(f"{name} is damaged: {error}") from error


def _sizes_of_all(root: Folder, info: CheckpointInfo, patience_seconds: float) -> dict[str, int]:
    """Bytes of each unit's file."""
    wanted = {unit_name(index, info.num_layers) + _UNIT for index in range(info.num_layers + 2)}
    deadline = time.monotonic() + patience_seconds
    while missing := wanted - (sizes := _sizes(root, info.folder)).keys():
        if time.monotonic() >= deadline:
            raise FileNotFoundError(
                f"{info.folder} has no {min(missing)}, which a worker has written: all must see the same location"
            )
        time.sleep(_LOOK_SECONDS)
    return {file: sizes[file] for file in sorted(wanted)}


def _sizes(root: Folder, name: str) -> dict[str, int]:
    with contextlib.suppress(FileNotFoundError):
        return root.sizes(name)
    return {}


def _durable(root: Folder, name: str) -> CheckpointInfo | None:
    """What the folder's marker says; None where it has none, or lacks what the marker lists."""
    try:
        marker = json.loads(root.read(f"{name}/{MARKER}"))
        sizes = root.sizes(name)
        damaged = [file for file, size in marker.pop(_FILES, {}).items() if sizes.get(file) != size]
        if not damaged:
            return CheckpointInfo.model_validate(marker)
    except FileNotFoundError:
        return None
    except ValueError:
        damaged = [MARKER]
    logger.warning("%s is no checkpoint: %s is damaged", root.path(name), ", ".join(damaged))
    return None


def _newest_first(root: Folder) -> list[str]:
    found = [(int(match[2]), int(match[1]), match[0]) for name in root.names() if (match := _FOLDER.match(name))]
    return [name for _, _, name in sorted(found, reverse=True)]


def _prune(root: Folder, keep: int) -> None:
    """Remove durable checkpoints beyond `keep`, and unfinished ones older than the oldest that stays."""
    kept = 0
    for name in _newest_first(root):
        if kept >= keep:
            root.remove(name)
        elif _durable(root, name) is not None:
            kept += 1
