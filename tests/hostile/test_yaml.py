"""YAML that means something else than it seems to, or was made to harm."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.recipe.loader import LONGEST, read_yaml
from stages.errors import UserError
from stages.plain import NO_TEXT, as_yaml, yaml_line
from tests.hostile.subjects import limited

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
REFUSED = {
    "octal": ("a: 010", "line 1: not valid YAML (010 is a number of base 8, 16 or 60"),
    "octal, 1.2": ("a: 0o17\nb: 0o8", None),
    "hexadecimal": ("a: 0x1F", "0x1F is a number of base 8, 16 or 60"),
    "binary": ("a: 0b11", "0b11 is a number of base"),
    "sexagesimal": ("a: 1\nb: 1:30", "line 2: not valid YAML (1:30 is a number of base"),
    "sexagesimal with a point": ("a: 1:30.5", "1:30.5 is a number of base"),
    "twice": ("a: 1\na: 2", "the key 'a' is there twice"),
    "laughs": (LAUGHS, "more than 100,000 settings, aliases written out"),
    "itself": ("a: &a {b: *a}", "an alias is within what it stands for"),
    "itself in a list": ("a: &a [*a]", "an alias is within what it stands for"),
    "deep": ("a: " + "[" * 5000 + "]" * 5000, "nested too deep"),
    "deep mapping": ("a: " + "{a: " * 5000 + "}" * 5000, "nested too deep"),
    "a bool that is none": ("a: !!bool word", "not valid YAML"),
    "a time that is none": ("a: !!timestamp word", "not valid YAML"),
    "a number that is none": ("a: !!int word", "not valid YAML"),
    "month 13": ("a: 2020-13-01", "not valid YAML (month must be in 1..12"),
    "python": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "a number as a name": ("1: a", "a setting's name must be text"),
    "a list as a name": ("? [a]\n: b", "a setting's name must be text"),
    "null byte": ("a: \0", "special characters are not allowed"),
    "an unclosed list": ("a: [1, 2", "line 1: not valid YAML"),
    "a variable in a flow": ("a: {path: ${DATA}/x}", "put quotes around a value with ${...}"),
}
READ = {
    "a: 10": 10, "a: -3": -3, "a: 0": 0, "a: 1_000": 1000, "a: 3e-5": 3e-5, "a: 1.5e3": 1500.0,
    "a: '010'": "010", "a: '1:30'": "1:30", "a: 1.50": 1.5, "a: .5": 0.5, "a: -0.0": 0.0,
    "a: 12:ab": "12:ab", "a: yes": True, "a: null": None, "b: &x 1\na: *x": 1,
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    text, expected = REFUSED[case]
    with limited():
        if expected is None:  # no number to YAML 1.1, which it is read as
            assert read_yaml(text, "x")[0] == {"a": "0o17", "b": "0o8"}
            return
        with pytest.raises(UserError) as found:
            read_yaml(text, "recipe x.yaml")
    message = str(found.value)
    assert expected in message and message.startswith("recipe x.yaml") and "\n" not in message


@pytest.mark.parametrize("text", READ)
def test_read(text):
    found = read_yaml(text, "x")[0]["a"]
    assert found == READ[text] and type(found) is type(READ[text])


TEXTS = st.text(max_size=8).filter(lambda text: not NO_TEXT.search(text))
NUMBERLIKE = st.text("0123456789eE+-._:", max_size=6)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


@given(TEXTS | NUMBERLIKE | NUMBERS | st.booleans() | st.none())
@example("1e5")
@example("12E4")
@example("-.5e+3")
@example("\x85")
def test_what_is_written_is_read_as_the_same(value):
    """In blocks, and on one line as `sentray new` writes it."""
    for text in (as_yaml({"a": value}), "a: " + yaml_line(value)):
        found = read_yaml(text, "x")[0]["a"]
        assert found == value and type(found) is type(value)


def test_files_without_an_end(tmp_path):
    from pipeline.recipe.document import Document

    (tmp_path / "long.yaml").write_text("a: 1\n" * (LONGEST // 5 + 1))
    for file in (tmp_path / "long.yaml", "/dev/zero"):
        with limited(), pytest.raises(UserError, match="more than 4,000,000 characters"):
            Document(str(file))
