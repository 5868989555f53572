"""Typed reads from a parsed ``config.json``, whose errors name the field and the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from moe_layer.errors import ConfigError

T = TypeVar("T")

_EXPECTED: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Fields:
    """The fields of one JSON object.

    Every read takes the names that a field goes by, the first that is present and not null wins; without a default an
    absent field is an error.

    Args:
        values: the object.
        source: its file, for messages.
        prefix: dotted path of the object inside the file, e.g. ``"text_config."``.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def fail(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {message}")

    def optional(self, kind: type[T], *names: str) -> T | None:
        """The field as ``kind``, or None where it is absent or null. Integers pass for floats, booleans for neither."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                self.fail(f"{self.prefix}{name} must be {_EXPECTED[kind]}, got {value!r}")
            return value
        return None

    def _read(self, kind: type[T], names: tuple[str, ...], default: T | None) -> T:
        value = self.optional(kind, *names)
        if value is not None:
            return value
        if default is None:
            also = f" (also known as {', '.join(names[1:])})" if len(names) > 1 else ""
            self.fail(f"missing field {self.prefix}{names[0]}{also}")
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        return self._read(int, names, default)

    def number(self, *names: str, default: float | None = None) -> float:
        return self._read(float, names, default)

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        return self._read(bool, names, default)

    def text(self, *names: str, default: str | None = None) -> str:
        return self._read(str, names, default)

    def choice(self, name: str, known: tuple[str, ...], default: str | None = None) -> str:
        """A string that must be one of ``known``."""
        value = self.text(name, default=default)
        if value not in known:
            self.fail(f"{self.prefix}{name} must be one of {', '.join(known)}, got {value!r}")
        return value

    def inner(self, name: str) -> Fields:
        """The fields of the object called ``name``."""
        return Fields(self._read(dict, (name,), None), self.source, f"{self.prefix}{name}.")
