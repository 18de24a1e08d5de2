"""docs/commands.md: every command with its arguments and options, as the command itself knows them."""

from collections.abc import Iterator

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from pipetransformer_client.cli.app import app
from tools.docs.markdown import GENERATED, code, table

_INTRODUCTION = """# Command line

`pipetransformer COMMAND`, or `kubectl pipetransformer COMMAND`. [Submit and watch jobs](cli.md) says what they are for,
and the exit codes.
"""


def rendered() -> str:
    """The page."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    commands = [group.commands[name] for name in sorted(group.commands)]
    return "\n".join([GENERATED + _INTRODUCTION, *(_section(one) for one in commands if isinstance(one, TyperCommand))])


def _section(command: TyperCommand) -> str:
    arguments = [f"{one.name}".upper() for one in command.params if isinstance(one, TyperArgument)]
    usage = code(" ".join(["pipetransformer", f"{command.name}", *arguments, "[OPTIONS]"]))
    return f"## {command.name}\n\n{usage}\n\n{command.help}\n\n" + table(("", "default", "meaning"), _rows(command))


def _rows(command: TyperCommand) -> Iterator[list[str]]:
    for parameter in command.params:
        is_argument = isinstance(parameter, TyperArgument)
        name = code(f"{parameter.name}".upper()) if is_argument else ", ".join(map(code, parameter.opts))
        default = "" if parameter.default in (None, False) else code(str(parameter.default))
        yield [name, "required" if parameter.required else default, str(getattr(parameter, "help", None) or "")]
