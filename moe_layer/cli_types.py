"""Arguments of the command line that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
USER_ERROR = 2
RAW = argparse.RawDescriptionHelpFormatter


def many(item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argparse type: values separated by commas."""

    def parse(text: str) -> tuple[T, ...]:
        return tuple(item(part) for part in text.split(",") if part)

    parse.__name__ = getattr(item, "__name__", "list")
    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


names = many(str)
positive = at_least(1)
