"""Escaping of text from programs for a terminal. The text must not control the terminal or reorder what people read."""

import re

UNSEEN = re.compile(
    "[\x7f-\x9f"  # DEL and the C1 controls: U+009B begins an escape sequence, like ESC and [
    "\xad\u034f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb"  # directions, zero width
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # surrogates, tags
)
_OBEYED = re.compile(f"[\x00-\x08\x0b-\x1f]|{UNSEEN.pattern}")


def escaped(line: str) -> str:
    r"""Return a line of JSON with such characters written as `\uXXXX`, which has the same meaning. JSON itself escapes
    characters up to U+001F."""
    return UNSEEN.sub(_as_json, line)


def plain(text: str) -> str:
    r"""Return any text with such characters written as `\uXXXX`. Line breaks and tabs stay."""
    return _OBEYED.sub(_as_json, text)


def _as_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
