"""Checkpoints with one file per unit, so that any layout can load the units that it needs.

`LOCATION/step-000000000120-g3-1f0c9a52/` holds `embedding.safetensors`, `blocks.0.safetensors`, ... and the marker
`DONE.json`, which is written last. A folder without the marker, or without a file that the marker lists, does not
count. Workers save their units by `save_unit`. Then one worker calls `commit`. The folder's name has the layout
generation, so a late worker of an older generation writes elsewhere. It has a digest of the generation's nonce, so two
jobs never write into one folder.
"""

import contextlib
import functools
import hashlib
import json
import logging
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
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
#: Suffix of the name of a complex tensor. It is written as pairs of real numbers, because the format lacks the type.
_COMPLEX = "@complex128"
#: Key in the metadata of a unit's file for its checksum. A file that another program wrote has none.
_CHECKSUM = "crc32"
#: Key in the marker for the sizes of the units' files in bytes. The other keys are the fields of `CheckpointInfo`.
_FILES = "files"
#: Seconds to wait until files of other workers are visible. An NFS client may cache a listing, or that a file is
#: missing, for 60 s.
_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.5
#: Pattern of the checkpoints' folders. A folder that a user renamed or copied does not match, and is ignored.
_FOLDER = re.compile(r"^step-(\d+)-g(\d+)(?:-[0-9a-f]{8})?$")


class CheckpointInfo(Wire):
    """What the marker of a checkpoint says. It is enough to load the checkpoint in any layout.

    Attributes:
        step: committed steps.
        boundary: number of frozen layers.
        layout_generation: the layout generation that wrote the checkpoint, counted across jobs
            (`Control.lasting_generation`).
        nonce: nonce of that generation.
        num_layers: number of layers of the model.
        min_stages: number of stages that a restart begins with.
        num_shards: number of shards (C) of the data's order.
        state: the control state with keys in camelCase. Its JSON may have NaN and infinity.
        run: `Job.identity` of the run that wrote the checkpoint. A run that resumes it must have the same.
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


def save_unit(location: str, info: CheckpointInfo, unit: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the file of one unit. The checkpoint counts only after `commit`.

    Args:
        location: location of the checkpoints.
        info: the checkpoint's marker.
        unit: name of the unit (`PipelineModel.unit_name`).
        tensors: the unit's committed parameters, buffers and optimizer state, under any names.
    """
    stored = _on_host(tensors)
    Folder(location).write(f"{info.folder}/{unit}{_UNIT}", *_parts(stored, {_CHECKSUM: _checksum(stored)}))


def to_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors, for `from_bytes`.

    A tensor that has two names, as when two modules share a weight, is written twice. The format cannot share tensors.
    """
    return b"".join(_parts(_on_host(tensors), metadata or {}))


def _parts(stored: Mapping[str, Tensor], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """The parts of a safetensors file, in order: the length of its header, the header, and the values of each tensor.

    The values are not copied. `safetensors.torch.save` copies them into fresh memory, which takes longer than to write
    them, and no other thread runs meanwhile. `save_file` makes no copy, but only the owner may read its file (0.8), its
    errors have no number, and it cannot write to an object store.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    values, end = [], 0
    for name, tensor in sorted(stored.items(), key=lambda item: (-item[1].itemsize, item[0])):  # so all are aligned
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _type_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
        values.append(_values(tensor))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *values]


@functools.cache
def _type_name(dtype: torch.dtype) -> str:
    """The format's name of a type, from a file without values."""
    header = json.loads(safetensors.torch.save({"": torch.empty(0, dtype=dtype)})[8:])
    return str(header[""]["dtype"])


def _values(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def from_bytes(content: bytes) -> dict[str, Tensor]:
    """Read the tensors, on the CPU, from bytes that `to_bytes` or `save_unit` made.

    Raises:
        SafetensorError: the content is damaged.
    """
    stored = safetensors.torch.load(content)
    length = int.from_bytes(content[:8], "little")
    checksum = json.loads(content[8 : 8 + length]).get("__metadata__", {}).get(_CHECKSUM)
    if checksum not in (None, _checksum(stored)):
        raise SafetensorError("the tensors do not have the file's checksum")
    return {
        name.removesuffix(_COMPLEX): torch.view_as_complex(tensor) if name.endswith(_COMPLEX) else tensor
        for name, tensor in stored.items()
    }


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors can store them: contiguous, in host memory, real, and no two in the same memory."""
    content: dict[str, Tensor] = {}
    written: set[int] = set()
    for name, tensor in tensors.items():
        on_host = tensor.detach().contiguous().cpu()
        if on_host.dtype is torch.complex128:
            name, on_host = name + _COMPLEX, torch.view_as_real(on_host)
        content[name] = on_host.clone() if on_host.data_ptr() in written else on_host
        written.add(on_host.data_ptr())
    return content


def _checksum(stored: Mapping[str, Tensor]) -> str:
    """CRC-32 of names, types, shapes and values, of which a few wrong bytes would otherwise train on unnoticed."""
    checksum = 0
    for name, tensor in sorted(stored.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(_values(tensor), checksum)
    return f"{checksum:08x}"


def commit(location: str, info: CheckpointInfo, *, keep: int = 2, patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Write the marker of a checkpoint whose units are all saved, so that it counts. Then remove older checkpoints.

    Args:
        location: location of the checkpoints.
        info: the marker.
        keep: number of newest checkpoints to keep.
        patience_seconds: seconds to wait until the files of other workers are visible to this worker.

    Raises:
        FileNotFoundError: a unit's file is missing, because workers see different storage under this location.
        StaleCheckpointError: the location has a durable checkpoint of a higher layout generation, or of another job's
            generation with the same number.
    """
    root = Folder(location)
    newest = latest(location)
    if newest is not None and newest.layout_generation > info.layout_generation:
        raise StaleCheckpointError(
            f"{location}: generation {newest.layout_generation} wrote the checkpoint of step {newest.step}; "
            f"the older generation {info.layout_generation} may not replace it with step {info.step}"
        )
    if newest is not None and newest.layout_generation == info.layout_generation and newest.nonce != info.nonce:
        raise StaleCheckpointError(
            f"{location}: another run, which started at the same time, wrote {newest.folder} here. So {info.folder}"
            " does not count: give each run its own location"
        )
    marker = info.to_wire() | {_FILES: _sizes_of_all(root, info, patience_seconds)}
    root.write(f"{info.folder}/{MARKER}", json.dumps(marker).encode())
    try:
        _prune(root, keep)
    except OSError as error:  # the checkpoint is durable, and the next one prunes again
        logger.warning("%s: older checkpoints cannot be removed: %s", location, error)


def latest(location: str) -> CheckpointInfo | None:
    """Read the newest durable checkpoint: of those with the highest layout generation, the one with the highest step.
    None without any."""
    root = Folder(location)
    return next((info for name in _newest_first(root.names()) if (info := _durable(root, name)) is not None), None)


def newest_generation(location: str) -> int:
    """The highest layout generation that has a folder at `location`, durable or not; 0 if there is no folder."""
    return max((int(match[2]) for name in Folder(location).names() if (match := _FOLDER.match(name))), default=0)


def find(location: str, folder: str, *, patience_seconds: float = _PATIENCE_SECONDS) -> CheckpointInfo | None:
    """Read the marker of the checkpoint in `folder` (`CheckpointInfo.folder`), which another worker has found durable.

    Args:
        location: location of the checkpoints.
        folder: name of the folder.
        patience_seconds: seconds to wait until the marker is visible to this worker.

    Returns:
        The marker; None if it is not visible in time, or if it is not visible and a newer checkpoint is durable.
    """
    root = Folder(location)
    for _ in _looks(patience_seconds):
        if (found := _durable(root, folder)) is not None:
            return found
        newest = latest(location)
        if newest is not None and _newest_first([newest.folder, folder])[0] != folder:
            break
    return None


def load_unit(location: str, info: CheckpointInfo, unit: str) -> dict[str, Tensor]:
    """Read the tensors that `save_unit` wrote for a unit, on the CPU.

    Raises:
        OSError: the unit's file is missing or damaged.
    """
    name = f"{info.folder}/{unit}{_UNIT}"
    try:
        return from_bytes(Folder(location).read(name))
    except SafetensorError as error:
        raise OSError(f"{name} is damaged: {error}") from error


def _sizes_of_all(root: Folder, info: CheckpointInfo, patience_seconds: float) -> dict[str, int]:
    """Wait until the files of all units are visible, and return their sizes in bytes by file name.

    Raises:
        FileNotFoundError: a file is not visible in time.
    """
    wanted = {unit_name(index, info.num_layers) + _UNIT for index in range(info.num_layers + 2)}
    for _ in _looks(patience_seconds):
        sizes = _sizes(root, info.folder)
        if not (missing := wanted - sizes.keys()):
            return {file: sizes[file] for file in sorted(wanted)}
    raise FileNotFoundError(
        f"{info.folder} has no {min(missing)}, although a worker wrote it: all workers must share this location"
    )


def _looks(patience_seconds: float) -> Iterator[None]:
    """Yield once for each look at files that other workers have written, until the patience is over."""
    deadline = time.monotonic() + patience_seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        yield


def _sizes(root: Folder, name: str) -> dict[str, int]:
    with contextlib.suppress(FileNotFoundError):
        return root.sizes(name)
    return {}


def _durable(root: Folder, name: str) -> CheckpointInfo | None:
    """Read the marker in the folder `name`; None if it is missing, or if a file that it lists is missing or damaged."""
    damaged = [MARKER]
    try:
        marker = json.loads(root.read(f"{name}/{MARKER}"))
        files = marker.pop(_FILES, {}) if isinstance(marker, dict) else None
        if isinstance(files, dict):
            sizes = root.sizes(name)
            damaged = [file for file, size in files.items() if sizes.get(file) != size]
            if not damaged:
                return CheckpointInfo.model_validate(marker)
    except FileNotFoundError:
        return None
    except ValueError:
        damaged = [MARKER]
    logger.warning("ignoring checkpoint %s: %s is damaged", root.path(name), ", ".join(damaged))
    return None


def _newest_first(names: Iterable[str]) -> list[str]:
    """Those of these names that are names of checkpoints' folders."""
    found = [(int(match[2]), int(match[1]), match[0]) for name in names if (match := _FOLDER.match(name))]
    return [name for _, _, name in sorted(found, reverse=True)]


def _prune(root: Folder, keep: int) -> None:
    """Keep the `keep` newest durable checkpoints, and remove all folders that are older than these."""
    kept = 0
    for name in _newest_first(root.names()):
        if kept >= keep:
            root.remove(name)
        elif _durable(root, name) is not None:
            kept += 1
