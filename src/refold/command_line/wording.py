"""Numbers and kinds inside sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 change, 2 changes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def kind_of(thing: object) -> str:
    """a str, an int: what a thing is, by the name of its class."""
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
