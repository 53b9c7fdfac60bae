r"""JSON of the few kinds of values that events are made of, written without the module `json`.

Every agent writes events, and importing `json` would take as long as writing thousands of them.
The text is the same to the byte as that of `json.dumps`: ASCII only, `\u` for everything else.

What JSON has no word for (a date, a path, a tensor) becomes what `str` makes of it, where `json`
would raise: an event is worth having even so, and no handler is at fault for what is in it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b"}
_SHORT["\f"] = "\\f"
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)}
_ESCAPES |= {ord(one): text for one, text in _SHORT.items()}
_NAMES = {float("inf"): "Infinity", float("-inf"): "-Infinity"}


DEPTH_MAX = 50
"""How deep values may lie within each other; one that is in itself has no end."""


def json_text(value: Any, depth: int = 0) -> str:
    """Return a value as JSON. Never raises."""
    if depth > DEPTH_MAX:
        return '"..."'
    match value:
        case None:
            return "null"
        case True:
            return "true"
        case False:
            return "false"
        case str():
            return _quoted(value)
        case int():
            return int.__repr__(value)
        case float():
            return _number(value)
        case dict():
            pairs = (f"{_key(key)}: {json_text(inner, depth + 1)}" for key, inner in value.items())
            return "{" + ", ".join(pairs) + "}"
        case list() | tuple():
            return "[" + ", ".join(json_text(inner, depth + 1) for inner in value) + "]"
    return _quoted(_shown(value))


def _number(value: float) -> str:
    if value != value:  # Only what is not a number differs from itself.
        return "NaN"
    return _NAMES.get(value) or float.__repr__(value)


def _key(key: object) -> str:
    if key is None or isinstance(key, (bool, int, float)):
        return f'"{json_text(key)}"'
    return _quoted(key if isinstance(key, str) else _shown(key))


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 (a value may be of anybody's class)
        return f"<{type(value).__name__}>"


def _quoted(text: str) -> str:
    text = str.translate(text, _ESCAPES)
    if not text.isascii():
        text = "".join(one if one.isascii() else _escaped(one) for one in text)
    return f'"{text}"'


def _escaped(character: str) -> str:
    """Return a character as its UTF-16 words; half of a pair stays what it is."""
    words = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{words[at : at + 4]}" for at in range(0, len(words), 4))
