"""Strict construction of frozen dataclasses from plain mappings (JSON, YAML, command line).

Every configuration in the project is a frozen dataclass that validates itself in `__post_init__`.
This file is the one way to build such an object from untyped data: unknown keys are rejected with
the nearest known name, values are coerced by the field's type (PyYAML reads `1e-5` as a string),
and the error names the path of the offending key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the user."""


def build(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Make `cls` (a dataclass) from `data`, refusing unknown or missing keys."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__} must be a mapping of names to values, not {data!r}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"Unknown key {_join(where, str(key))!r}{suggestion(str(key), fields)}.")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ConfigError(f"Missing key {_join(where, name)!r}: {cls.__name__} needs it.")
    values = {key: coerce(hints[key], value, _join(where, key)) for key, value in data.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from None


def coerce(kind: Any, value: Any, where: str) -> Any:
    """Turn `value` into `kind`, or say in one sentence why that is impossible."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(typing.get_args(kind), value, where)
    if origin is typing.Literal:
        options = typing.get_args(kind)
        if value in options:
            return value
        raise ConfigError(f"{where} must be one of {_listed(options)}, not {value!r}{suggestion(str(value), options)}.")
    if origin is tuple:
        return _coerce_tuple(typing.get_args(kind), value, where)
    if origin is list:
        (item,) = typing.get_args(kind)
        return [coerce(item, entry, f"{where}[{i}]") for i, entry in enumerate(_sequence(value, where))]
    if origin in (dict, Mapping) or kind is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a mapping, not {value!r}.")
        arguments = typing.get_args(kind)
        if not arguments:
            return dict(value)
        # YAML reads the key 101 as a number
        names = {str(key) if arguments[0] is str else key: entry for key, entry in value.items()}
        return {key: coerce(arguments[1], entry, _join(where, str(key))) for key, entry in names.items()}
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, typing.cast(type, kind)) else build(typing.cast(type, kind), value, where)
    return _coerce_scalar(kind, value, where)


def plain(value: Any) -> Any:
    """The inverse of `build`: dataclasses become dictionaries, tuples lists, enums and paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid deeply on `base`; mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read one JSON or YAML mapping from `path`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix.lstrip('.') or 'YAML'}: {_one_line(error)}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one mapping of names to values.")
    return data


def suggestion(name: str, known: Any) -> str:
    """`, did you mean 'x'?` or the list of what is known: the tail of an error message."""
    names = [str(entry) for entry in known]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(names))}"


def _coerce_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return coerce(option, value, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _coerce_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    items = list(_sequence(value, where))
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(coerce(kinds[0], entry, f"{where}[{i}]") for i, entry in enumerate(items))
    if len(items) != len(kinds):
        raise ConfigError(f"{where} must hold {len(kinds)} values, not {len(items)}.")
    return tuple(coerce(kind, entry, f"{where}[{i}]") for i, (kind, entry) in enumerate(zip(kinds, items, strict=True)))


def _coerce_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif kind in (int, float):
        number = _number(value)
        whole = isinstance(number, int) or (number is not None and number.is_integer())
        if number is not None and (not math.isnan(number) if kind is float else whole):
            return kind(number)
    elif kind is str:
        if isinstance(value, str):
            return value
    elif isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return value if isinstance(value, kind) else kind(value)
        except ValueError:
            options = [entry.value for entry in kind]
            raise ConfigError(f"{where} must be one of {_listed(options)}, not {value!r}.") from None
    elif kind is Path:
        if isinstance(value, (str, Path)):
            return Path(value)
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ConfigError(f"{where} must be {_article(getattr(kind, '__name__', str(kind)))}, not {value!r}.")


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _sequence(value: Any, where: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise ConfigError(f"{where} must be a list, not {value!r}.")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _listed(options: Any) -> str:
    return ", ".join(repr(option) for option in options)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
