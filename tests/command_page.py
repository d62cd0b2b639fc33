"""The page of the command line, from its help.

python -m tests.command_page    # writes it anew
"""

from pathlib import Path

import typer

from poros.cli.app import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "command-line.md"


def lines() -> list[str]:
    """The page."""
    group: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    found = ["# Command line", ""]
    found += ["<!-- python -m tests.command_page -->", ""]
    for name, command in group.commands.items():
        found += [f"## `poros {name}`", "", *(command.help or "").strip().splitlines(), ""]
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        arguments = [each for each in shown if each.param_type_name == "argument"]
        options = [each for each in shown if each.param_type_name == "option"]
        if arguments or options:
            found += ["| | |", "| --- | --- |"]
        for each in arguments:
            found.append(f"| `{(each.name or '').upper()}` | {_help(each)} |")
        for each in options:
            names = ", ".join(f"`{one}`" for one in (*each.opts, *each.secondary_opts))
            found.append(f"| {names} | {_help(each)} |")
        found.append("")
    return found


def _help(parameter: object) -> str:
    text = str(getattr(parameter, "help", None) or "").replace("|", "\\|")
    shown = getattr(parameter, "metavar", None) or ""
    if "|" in shown:
        text += f" Values: {', '.join(shown.split('|'))}."
    elif shown in ("INTEGER", "NUMBER", "SIZE"):
        text += f" Type: {shown.lower()}."
    default = getattr(parameter, "show_default", None)
    if isinstance(default, str) and default:
        text += f" Default: {default}."
    return text


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()), encoding="utf-8")
