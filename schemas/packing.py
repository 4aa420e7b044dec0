"""Compresses long texts in the database, since outputs of programs are mostly repetitive."""

import base64
import binascii
import zlib
from typing import Any

from sqlalchemy import Text
from sqlalchemy.types import TypeDecorator

LONG = 4096
"""Texts of at least this many characters are compressed."""
MARK = "\x01z:"
"""The beginning of a compressed text."""


class Packed(TypeDecorator[str]):
    """A column of text that stores long values compressed."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Any) -> str | None:
        """Compress a text on its way into the database."""
        return None if value is None else pack(value)

    def process_result_value(self, value: str | None, _dialect: Any) -> str | None:
        """Decompress a text on its way out of the database."""
        return None if value is None else unpack(value)


def pack(text: str) -> str:
    """The text as it is stored. A text that begins with the mark is always packed, so that `unpack` restores it."""
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
