"""Renders docs/commands.md: every command with its arguments and options, from the application itself."""

from collections.abc import Iterator

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from pipetransformer_client.cli.app import app
from tools.docs.markdown import GENERATED, code, table

_INTRODUCTION = """# Command line

`pipetransformer COMMAND`, or `kubectl pipetransformer COMMAND`. [Submit and watch jobs](cli.md) explains when to use
each command, and the exit codes.
"""


def rendered() -> str:
    """The page."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return "\n".join([GENERATED + _INTRODUCTION, *(_section(name, one) for name, one in _commands(group))])


def _commands(group: TyperGroup, before: str = "") -> Iterator[tuple[str, TyperCommand]]:
    """All commands by name, those of a group with the group's name before theirs."""
    for name in sorted(group.commands):
        command = group.commands[name]
        if isinstance(command, TyperGroup):
            yield from _commands(command, f"{before}{name} ")
        elif isinstance(command, TyperCommand):
            yield f"{before}{name}", command


def _section(name: str, command: TyperCommand) -> str:
    arguments = [f"{one.name}".upper() for one in command.params if isinstance(one, TyperArgument)]
    usage = code(" ".join(["pipetransformer", name, *arguments, "[OPTIONS]"]))
    return f"## {name}\n\n{usage}\n\n{command.help}\n\n" + table(("", "default", "meaning"), _rows(command))


def _rows(command: TyperCommand) -> Iterator[list[str]]:
    for parameter in command.params:
        is_argument = isinstance(parameter, TyperArgument)
        name = code(f"{parameter.name}".upper()) if is_argument else ", ".join(map(code, parameter.opts))
        default = "" if parameter.default in (None, False) else code(str(parameter.default))
        yield [name, "required" if parameter.required else default, str(getattr(parameter, "help", None) or "")]
