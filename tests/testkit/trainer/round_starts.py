"""Watches whether a worker that leaves a round of several steps goes back to the very bits with which it began."""

import hashlib
import json
from pathlib import Path
from unittest import mock

from pipetransformer.training.commit import Committer


def watch(path: Path) -> None:
    """From now on, each time that this process goes back to the start of a round, append a line to `path`: whether the
    weights and moments had `changed`, and whether they are `equal` again."""
    begin_steps, go_back = Committer.begin_steps, Committer.go_back
    begun: dict[int, str] = {}

    def begin_and_note(committer: Committer) -> None:
        begin_steps(committer)
        begun[id(committer)] = _digest(committer)

    def go_back_and_compare(committer: Committer) -> None:
        began = committer.is_ahead
        changed = began and _digest(committer) != begun[id(committer)]
        go_back(committer)
        if began:
            line = {"changed": changed, "equal": _digest(committer) == begun[id(committer)]}
            with path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")

    mock.patch.object(Committer, "begin_steps", begin_and_note).start()
    mock.patch.object(Committer, "go_back", go_back_and_compare).start()


def _digest(committer: Committer) -> str:
    """Of all that the optimizer steps, with its moments."""
    found = hashlib.sha256()
    if committer.optimizer is not None:
        for group in committer.optimizer.param_groups:
            for weight in group["params"]:
                for tensor in (weight.detach(), *committer.optimizer.state[weight].values()):
                    found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
