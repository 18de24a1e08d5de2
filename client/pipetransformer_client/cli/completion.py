"""Completes words of the command line, for Typer and for kubectl.

kubectl calls the program `kubectl_complete-pipetransformer` with the words so far; the last one may be empty. The
program prints one completion on each line, then a directive of Cobra, kubectl's command-line library. For the command
`pipetransformer`, Typer does the same (`--install-completion`).
"""

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

#: Directives of Cobra: do not add file names; add neither file names nor a space; add files with the printed endings;
#: add folders.
_NO_FILES, _NO_FILES_NO_SPACE, _FILES_ENDING, _FOLDERS = ":4", ":6", ":8", ":16"
_ENDINGS = ("yaml", "yml", "json")


def complete_job(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the jobs in the namespace of the options; empty if the cluster does not answer."""
    from pipetransformer_client.client import Client
    from pipetransformer_client.errors import ClientError

    chosen = context.params
    try:
        client = Client.connect(context=chosen.get("context"), namespace=chosen.get("namespace"))
        return [job.name for job in client.jobs() if job.name.startswith(incomplete)]
    except ClientError:
        return []


def complete_record(context: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs, and of folders on this machine."""
    parent, slash, begin = incomplete.rpartition("/")
    try:
        names = sorted(path.name for path in Path(f"{parent}{slash}").iterdir() if path.is_dir())
    except OSError:
        names = []
    folders = [f"{parent}{slash}{name}/" for name in names if name.startswith(begin)]
    return [*complete_job(context, incomplete), *folders]


def complete_field(incomplete: str) -> list[str]:
    """Paths of a job's fields for `--set`."""
    from .set_fields import field_paths

    return [f"{path}=" for path in field_paths() if path.startswith(incomplete)]


def main() -> None:
    """Prints the completions that kubectl asks for."""
    from .app import app

    words = sys.argv[1:]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    if (answer := _paths(group, words)) is not None:
        print(answer)
        return
    os.environ["_PIPETRANSFORMER_COMPLETE"] = "complete_bash"  # Typer's protocol: one word on each line
    os.environ |= {"COMP_WORDS": shlex.join(["pipetransformer", *words]), "COMP_CWORD": str(len(words))}
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as answered:
        app(prog_name="pipetransformer")
    found = answered.getvalue().split()
    unfinished = found and all(word.endswith(("=", "/")) for word in found)
    print("\n".join([*found, _NO_FILES_NO_SPACE if unfinished else _NO_FILES]))


def _paths(group: TyperGroup, words: Sequence[str]) -> str | None:
    """If the last word is a path, the directive that lets the shell complete it; otherwise None."""
    command = group.commands.get(words[0]) if words else None
    if not isinstance(command, TyperCommand) or len(words) < 2 or words[-1].startswith("-"):
        return None
    asked = _asked(command, words[1:-1])
    if asked is None or command.callback is None:
        return None
    declared = get_type_hints(command.callback, include_extras=True)[str(asked.name)]
    kind, *info = get_args(declared) if get_origin(declared) is Annotated else (declared,)
    if Path not in (kind, *get_args(kind)):
        return None
    return "\n".join([*_ENDINGS, _FILES_ENDING]) if info[0].file_okay else _FOLDERS


def _asked(command: TyperCommand, words: Sequence[str]) -> TyperOption | TyperArgument | None:
    """The option or argument whose value comes after these words; None if no value does."""
    options = {name: one for one in command.params if isinstance(one, TyperOption) for name in one.opts}
    if words and (option := options.get(words[-1])) is not None and not option.is_flag:
        return option
    context = command.make_context(command.name, list(words), resilient_parsing=True)
    for one in command.params:
        source = context.get_parameter_source(str(one.name))
        if isinstance(one, TyperArgument) and (source is None or source.name != "COMMANDLINE"):
            return one
    return None


if __name__ == "__main__":
    main()
