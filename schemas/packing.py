"""Long texts are compressed in the database: outputs of programs are mostly repetitive."""

import base64
import binascii
import zlib
from typing import Any

from sqlalchemy import Text
from sqlalchemy.types import TypeDecorator

LONG = 4096
"""Characters from which on a text is worth compressing."""
MARK = "\x01z:"
"""The beginning of a compressed text."""


class Packed(TypeDecorator[str]):
    """A column of text that stores long values compressed."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Any) -> str | None:
        """A text on its way into the database."""
        return None if value is None else pack(value)

    def process_result_value(self, value: str | None, _dialect: Any) -> str | None:
        """A text on its way out."""
        return None if value is None else unpack(value)


def pack(text: str) -> str:
    """The text as it is stored. One that looks like a packed text is packed, whatever its length."""
    marked = text.startswith(MARK)
    if len(text) < LONG and not marked:
        return text
    packed = MARK + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    return packed if marked or len(packed) < len(text) else text


def unpack(stored: str) -> str:
    """The text that was packed."""
    if not stored.startswith(MARK):
        return stored
    try:
        return zlib.decompress(base64.b64decode(stored[len(MARK) :], validate=True)).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError):  # a row of an older version may begin with the mark
        return stored
