"""The page of the command line, from its help.

python -m tests.command_page    # writes it anew
"""

from pathlib import Path
from typing import Any, get_type_hints

import typer

from poros.cli.app import app
from poros.recipes.values import shown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "command-line.md"


def lines() -> list[str]:
    """The page."""
    group: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    found = ["# Command line", ""]
    found += ["<!-- python -m tests.command_page -->", ""]
    for name, command in group.commands.items():
        found += [f"## `poros {name}`", "", *(command.help or "").strip().splitlines(), ""]
        hints = get_type_hints(command.callback)
        visible = [each for each in command.params if not getattr(each, "hidden", False)]
        arguments = [each for each in visible if each.param_type_name == "argument"]
        options = [each for each in visible if each.param_type_name == "option"]
        if arguments or options:
            found += ["| | |", "| --- | --- |"]
        for each in arguments:
            found.append(f"| `{(each.name or '').upper()}` | {_help(each)} |")
        for each in options:
            names = ", ".join(f"`{one}`" for one in (*each.opts, *each.secondary_opts))
            found.append(f"| {names} | {_help(each, hints.get(each.name or ''))} |")
        found.append("")
    return found


def _help(parameter: Any, hint: Any = None) -> str:
    """The line of help, with the values that there are or the kind of number, and the default."""
    text = str(parameter.help or "").replace("|", "\\|")
    kind = parameter.metavar or shown(hint)
    if "|" in kind and kind == kind.lower():
        text += f" Values: {', '.join(kind.split('|'))}."
    elif kind in ("INTEGER", "NUMBER"):
        text += f" Type: {kind.lower()}."
    default = parameter.show_default if isinstance(parameter.show_default, str) else None
    if parameter.show_default is True and parameter.default not in (None, "") and hint is not bool:
        default = str(parameter.default)
    return f"{text} Default: {default}." if default else text


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()), encoding="utf-8")
