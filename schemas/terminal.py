"""Text from programs on a person's terminal: nothing in it may be obeyed by the terminal, or reorder what is read."""

import re

_UNSEEN = re.compile(
    "[\x7f-\x9f"  # DEL and the C1 controls: one of them begins an escape sequence, as ESC and [ do
    "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # directions, marks without width
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of characters; tags
)
_OBEYED = re.compile(f"[\x00-\x08\x0b-\x1f]|{_UNSEEN.pattern}")


def escaped(line: str) -> str:
    r"""A line of JSON with such characters as `\uXXXX`, which means the same; those up to U+001F are escaped in any
    JSON."""
    return _UNSEEN.sub(_as_json, line)


def plain(text: str) -> str:
    r"""Any text with such characters as `\uXXXX`; lines and tabs stay."""
    return _OBEYED.sub(_as_json, text)


def _as_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
