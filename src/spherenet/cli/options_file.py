"""Files of options: YAML without what could exhaust the memory or hide a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spherenet._util.files import read_regular
from spherenet._util.text import short
from spherenet.errors import InvalidArgument

__all__ = ["parse_yaml", "read_options"]

MAX_FILE_BYTES, MAX_NESTING = 100_000, 10  # a file of options has about 2 KB and two levels


def read_options(path: str) -> dict[Any, Any]:
    """Return the keys and values of a YAML file.

    Raises:
        InvalidArgument: If the file cannot be read or is not a mapping, with `--config PATH` as the argument.
    """
    source = f"--config {path}"
    try:
        content = read_regular(Path(path), MAX_FILE_BYTES, follow_links=True)
    except OSError as error:
        raise InvalidArgument(source, f"cannot be read: {error.strerror}.") from None
    values = parse_yaml(content, source)
    if not isinstance(values, dict):
        raise InvalidArgument(source, f"must contain lines of the form 'option: value', got {short(repr(values))}.")
    return values


def parse_yaml(content: bytes, source: str) -> Any:
    """Return the value of a YAML document without aliases, deep nesting or repeated keys.

    Raises:
        InvalidArgument: If there is none, with `source` as the argument.
    """
    import yaml  # type: ignore[import-untyped]

    depth = 0
    try:
        for event in yaml.parse(content.decode(), Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InvalidArgument(source, f"must not contain aliases, got *{short(event.anchor, 50)}.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_NESTING:
                raise InvalidArgument(source, f"must be nested at most {MAX_NESTING} levels deep.")
        _require_distinct_keys(yaml.compose(content, Loader=yaml.SafeLoader), source)
        return yaml.safe_load(content)
    except InvalidArgument:
        raise
    except UnicodeDecodeError as error:
        byte = f"0x{error.object[error.start]:02x} at {error.start}"
        raise InvalidArgument(source, f"must be UTF-8 text, got byte {byte}.") from None
    except (ValueError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise InvalidArgument(source, f"is not valid YAML: {short(detail, 300)}.") from None


def _require_distinct_keys(node: Any, source: str) -> None:
    """Raise InvalidArgument if a mapping of a YAML document has a key twice; yaml would take the last one."""
    if node is None or isinstance(node.value, str):
        return
    keys = set()
    for child in node.value:
        key, value = child if isinstance(child, tuple) else (None, child)  # pairs of a mapping, elements of a list
        if key is not None and isinstance(key.value, str):
            if (key.tag, key.value) in keys:
                line = key.start_mark.line + 1
                problem = f"must have each key once, got {short(repr(key.value))} again in line {line}."
                raise InvalidArgument(source, problem)
            keys.add((key.tag, key.value))
        _require_distinct_keys(value, source)
