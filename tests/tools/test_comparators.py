import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalpool.worker.judge.comparators import agrees, difference, surely

COMPARATORS = ("exact", "rstrip", "tokens", "lcb", "float:1e-6", "json", "json:unwrap")
TEXTS = st.text(st.sampled_from('12.+-e \n\r\t\x1b[],"x\u202eé\0'), max_size=12)


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


@pytest.mark.parametrize(
    ("comparator", "got", "expected", "told"),
    [
        ("rstrip", "1\n2\n4\n", "1\n2\n3\n", "at line 3: expected '3', got '4'"),
        ("rstrip", "1\n", "1\n2\n", "at line 2: expected '2', got no more output"),
        ("rstrip", "1\n2\n", "1\n", "at line 2: expected no more output, got '2'"),
        ("rstrip", "", "42", "at line 1: expected '42', got ''"),
        ("rstrip", "1 \n2", "1\n2", "at line 1: expected '1', got '1 '; the comparator tokens would accept it"),
        ("rstrip", "2.0", "2", "at line 1: expected '2', got '2.0'; the comparator lcb would accept it"),
        (
            "rstrip",
            "0.33333334",
            "0.33333333",
            "expected '0.33333333', got '0.33333334'; the comparator float:1e-6 would",
        ),
        ("rstrip", '{"a":1}', '{"a": 1}', "the comparator json would accept it"),
        ("exact", "a", "a\n", "at line 2: expected '', got no more output; the comparator rstrip would accept it"),
        ("exact", "a\r\n", "a\n", "at line 1: expected 'a', got 'a\\r'; the comparator rstrip would accept it"),
        ("tokens", "1 2\n3 5", "1 2 3 4", "at line 2: expected '4', got '5'"),
        ("tokens", "1 2", "1 2 3", "at line 1: expected '3', got no more output"),
        ("tokens", "1\n2\n3", "1 2", "at line 3: expected no more output, got '3'"),
        ("lcb", "\n\n1\n2", "1\n3", "at line 4: expected '3', got '2'"),
        ("lcb", "1\n2", "1", "at line 2: expected no more output, got '2'"),
        ("json", "[1, 2]", "[1, 3]", "at line 1: expected '[1, 3]', got '[1, 2]'"),
        ("json", "NaN", "NaN", "the texts are equal, but are not JSON that can be compared"),
        ("rstrip", "\x1b[2J", "\u202e", "expected '\\u202e', got '\\x1b[2J'"),
    ],
)
def test_the_first_difference_is_shown(comparator: str, got: str, expected: str, told: str) -> None:
    said = difference(comparator, got.encode(), expected)
    assert said.startswith(f"the output differs from what was expected (comparator {comparator})")
    assert told in said


def test_invalid_bytes_differ_from_the_replacement_character() -> None:
    assert "not valid UTF-8" in difference("exact", b"\xff", "\ufffd")


def test_only_the_part_of_a_long_line_around_the_difference_is_shown() -> None:
    expected = "a" * 1000 + "b" + "c" * 1000
    said = difference("rstrip", expected.replace("b", "d").encode(), expected)
    assert f"expected …'{'a' * 20}b{'c' * 39}'…, got …'{'a' * 20}d{'c' * 39}'…" in said
    assert len(difference("exact", b"\x1b" * 1000, "\U000e0001" * 1000)) < 600


@given(st.sampled_from(COMPARATORS), TEXTS, TEXTS)
def test_a_difference_is_described_in_one_printable_sentence(comparator: str, got: str, expected: str) -> None:
    for wanted in (expected, got, got + "\n", got.replace("\n", "\r\n")):
        said = difference(comparator, got.encode(), wanted)
        assert agrees(comparator, got.encode(), wanted) == (not said)
        assert said.isprintable()
        assert len(said) < 600
        if surely(comparator, got.encode(), wanted):
            assert not said
