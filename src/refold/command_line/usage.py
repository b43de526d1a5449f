"""Help in the usual signs: MODEL for what must be given, [NAME] for what may be, and nothing behind a switch."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _UsualSigns:
    """Takes out the signs that typer puts around names in some of its versions."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}") for piece in pieces]

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class Command(_UsualSigns, TyperCommand):
    """One command."""


class Group(_UsualSigns, TyperGroup):
    """`refold` itself."""
