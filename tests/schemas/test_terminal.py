import json
import unicodedata

import pytest

from evalpool.schemas.terminal import escaped, plain

HARMLESS = "größer 日本語 😀 «a» \u00a0\u3000 \ue000"
OBEYED = [
    chr(code)
    for code in range(0x110000)
    if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp", "Cs")
    or unicodedata.bidirectional(chr(code)) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    or chr(code) in "\u200e\u200f\u061c\u200b\ufeff\U000e0041"
]


def test_an_escaped_line_of_json_means_the_same_and_cannot_control_a_terminal() -> None:
    text = HARMLESS + "".join(each for each in OBEYED if not 0xD800 <= ord(each) < 0xE000)
    line = escaped(json.dumps(text, ensure_ascii=False))
    assert json.loads(line) == text
    assert not set(OBEYED) & set(line)
    assert HARMLESS in line
    assert "\\u009b" in line
    assert "\\u202e" in line
    assert "\\udb40\\udc41" in line


@pytest.mark.parametrize("kept", ["\n", "\t"])
def test_escaped_text_keeps_its_lines_and_cannot_control_a_terminal(kept: str) -> None:
    said = plain(HARMLESS + kept + "".join(OBEYED))
    assert set(OBEYED) & set(said) == {"\n", "\t"}
    assert said.startswith(HARMLESS + kept + "\\u0000\\u0001")
