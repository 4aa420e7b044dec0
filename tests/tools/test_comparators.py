import pytest

from worker.tools.comparators import agrees


@pytest.mark.parametrize(
    ("comparator", "got", "expected", "verdict"),
    [
        ("exact", b"a\n", "a\n", True),
        ("exact", b"a", "a\n", False),
        ("rstrip", b"a\n\n", "a", True),
        ("rstrip", b"a \n", "a", False),
        ("rstrip", b"a\r\nb\n", "a\nb", True),
        ("rstrip", b"a\n", "a\nb", False),
        ("tokens", b" 1  2\n3 ", "1 2 3", True),
        ("tokens", b"1 2", "1 2 3", False),
        ("tokens", b"A", "a", False),
        ("float:1e-6", b"0.3333333", "0.33333333", True),
        ("float:1e-6", b"0.33", "0.3333", False),
        ("float:0,0.1", b"0.35", "0.3", True),
        ("float:1e-6", b"50000000000000000", "50000000000000001", False),
        ("float:1e-6", b"nan", "nan", False),
        ("float:1e-6", b"inf", "1e999", False),
        ("float:1e-6", b"inf", "inf", True),
        ("float:1e-6", b"+-5", "5", False),
        ("float:1e-6", b"+5", "5", True),
        ("float:1e-6", b"9" * 5000, "9" * 4999 + "8", False),
        ("float:1e-6", b"yes 1.0", "yes 1", True),
        ("float:1e-6", b"1 2", "1", False),
        ("lcb", b"1.0 2 \n x", "1.00 2\nx", True),
        ("lcb", b"1.01", "1.0", False),
        ("lcb", b"a", "a\nb", False),
    ],
)
def test_comparators_agree_with_their_definition(comparator: str, got: bytes, expected: str, verdict: bool) -> None:
    assert agrees(comparator, got, expected) is verdict


def test_a_long_line_is_compared_word_by_word() -> None:
    assert agrees("lcb", b"1.50 2 " * 1000, "1.5 2.0 " * 1000)
    assert not agrees("lcb", b"1 2 3", "1 2")
    assert not agrees("lcb", b"1 2", "1 2 3")
    assert not agrees("lcb", b"1 x", "1 2")
