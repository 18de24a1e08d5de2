"""Bugs that the simulator must find: makes each in a copy of the tree, and lives until a rule is broken.

Exits 1 if a bug is not found within its number of lives.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.copy import Copy
from tests.mutants.entries import ROOT, Mutant

LIST = ROOT / "tests" / "mutants" / "simulate" / "bugs.toml"
#: Lives within which each bug has to be found. They take seconds; a bug that stops simulated time is given up.
LIVES, LIMIT_SECONDS = 600, 1800
_PACKAGES = ("contract", "operator", "client", "trainer_image")


def all_bugs() -> list[Mutant]:
    """Those of the list."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["bug"]]


def find(bug: Mutant, folder: Path) -> str:
    """What the simulator says of the bug; empty if it finds nothing within its lives and seconds."""
    copy = Copy(folder)
    copy.write(bug.file, bug.apply((copy.folder / bug.file).read_text()))
    paths = [str(copy.folder / package) for package in _PACKAGES]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy.folder), *paths])}
    command = [sys.executable, "-m", "tests.simulate", "--lives", str(LIVES), "--processes", "1", "--until-found"]
    try:
        ran = subprocess.run(
            command,
            cwd=copy.folder,
            env=environment,
            timeout=LIMIT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return ran.stdout.strip() if ran.returncode == 1 else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate.bugs", description=__doc__)
    parser.add_argument("only", nargs="*", help="words: only bugs whose file or sentence has one of them")
    arguments = parser.parse_args()
    words = arguments.only
    bugs = [one for one in all_bugs() if not words or any(word in f"{one.file} {one.breaks}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="bugs-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = [Path(folder) / str(number) for number in range(len(bugs))]
        found = 0
        tried = {pool.submit(find, bug, folder): bug for bug, folder in zip(bugs, folders, strict=True)}
        for ended in as_completed(tried):
            bug, said = tried[ended], ended.result()
            found += bool(said)
            print(f"{'found' if said else 'MISSED':6}  {bug.breaks}  {said}", flush=True)
    print(f"found {found} of {len(bugs)}")
    return 0 if found == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
