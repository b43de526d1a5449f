"""The commands of `refold`, their options and exit codes, from the command line's own definitions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer
from generated_text import fenced, table, write

from refold.command_line.app import app
from refold.command_line.execution import ExitCode


def write_command_page(path: Path) -> None:
    """Write the text that the page about the command line includes."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = [section(name, command) for name, command in commands.items()]
    codes = table(("exit code", "meaning"), [(str(int(code)), code.meaning) for code in ExitCode])
    write(path, "\n\n".join([*parts, "## Exit codes", codes]) + "\n")


def section(name: str, command: Any) -> str:
    """One command: how it is called, what it does, its arguments and options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["refold", name, *(shown(p) for p in arguments), "[OPTIONS]"])
    rows = [(f"`{shown(p)}`", p.help or "") for p in arguments]
    rows += [(f"`{' '.join([*p.opts, value_of(p)]).strip()}`", p.help or "") for p in options]
    about = inspect.cleandoc(command.help or "")
    return "\n\n".join([f"## refold {name}", fenced(usage, "text"), about, table(("argument or option", ""), rows)])


def shown(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper().replace("_", "-")
    optional = parameter.param_type_name == "argument" and not parameter.required
    return f"[{name}]" if optional else name


def value_of(option: Any) -> str:
    """What stands behind an option; nothing behind a switch."""
    return "" if option.is_flag else shown(option)
