"""Trains `examples/finetune-digits.yaml` twice, unfrozen and freezing, and compares them.

The runs have the same seed, hyperparameters, workers and controller. `DEMO_BASELINE=recorded` does not train the
unfrozen run, and compares with a recorded one.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pipetransformer_contract.api.manifest import local_manifest, read_documents

from . import picture
from .compare import compare, figures, sentence
from .lines import Lines, alone, side_by_side
from .measured import Measured, load, save
from .runs import RunFailed, train, variant

MANIFEST = Path("examples/finetune-digits.yaml")
RECORDED = Path(__file__).with_name("baseline.json")


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="folder for records and results")
    parser.add_argument("--seed", type=int, help="instead of the seed in the manifest")
    parser.add_argument("--record-baseline", action="store_true", help="train the unfrozen run alone, and record it")
    arguments = parser.parse_args()
    where = os.environ.get("DEMO_BASELINE", "measured")
    if where not in ("measured", "recorded"):
        parser.error(f"DEMO_BASELINE is {where!r}: it may be measured or recorded")
    if arguments.seed is not None and (where == "recorded" or arguments.record_baseline):
        parser.error("--seed: the recorded baseline has the seed of the manifest, so leave one of both out")
    if any((arguments.run_dir / name).exists() for name in ("unfrozen", "freezing")):
        parser.error(f"{arguments.run_dir} holds an earlier demo: remove it, or name another folder by --run-dir")
    (document,) = read_documents(MANIFEST)
    demo = Demo(local_manifest(document), arguments.run_dir, arguments.seed)
    try:
        if arguments.record_baseline:
            save(demo.unfrozen(), RECORDED)
            print(f"recorded in {RECORDED}")
            return 0
        demo.whole(recorded=where == "recorded", began=began)
    except (RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class Demo:
    """Both runs and what is made of them."""

    def __init__(self, manifest: dict[str, Any], folder: Path, seed: int | None) -> None:
        self._manifest = manifest
        self._folder = folder
        self._seed = seed
        self._out = Console(soft_wrap=True)

    def whole(self, *, recorded: bool, began: float) -> None:
        """Trains, compares, and writes `demo.png` and `summary.json`."""
        unfrozen = load(RECORDED) if recorded else self.unfrozen()
        if recorded:
            baseline = f"the same job without freezing, recorded earlier on {unfrozen.machine}"
        else:
            baseline = "the same job without freezing, trained just before on this machine"
        freezing = self.freezing(unfrozen)
        compared = compare(unfrozen, freezing)
        pictures = picture.draw(unfrozen, freezing, self._folder)
        summary = self._folder / "summary.json"
        seed = self._manifest["spec"]["training"].get("seed", 0) if self._seed is None else self._seed
        content = figures(compared, seconds=time.monotonic() - began, seed=seed, baseline=baseline)
        summary.write_text(json.dumps(content, indent=2) + "\n")
        self._say(f"\npicture: {pictures[0]}, figures: {summary}, record: {self._folder / 'freezing'}")
        self._say(sentence(compared, baseline))

    def unfrozen(self) -> Measured:
        """Trains the job without freezing."""
        folder = self._folder / "unfrozen"
        self._say("unfrozen: layout, time, held-out accuracy after each epoch")
        lines = Lines(folder, self._out, alone)
        measured = train(variant(self._manifest, freezing=False, seed=self._seed), folder, lines.changed)
        lines.changed()
        return measured

    def freezing(self, unfrozen: Measured) -> Measured:
        """Trains the job as it is."""
        folder = self._folder / "freezing"
        self._say("freezing: each decision, beside the unfrozen run at that step")
        self._say(f"{'step':>6}  {'unfrozen':<20} | freezing")
        lines = Lines(folder, self._out, partial(side_by_side, unfrozen=unfrozen.record))
        measured = train(variant(self._manifest, freezing=True, seed=self._seed), folder, lines.changed)
        lines.changed()
        return measured

    def _say(self, words: str) -> None:
        self._out.print(words, highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
