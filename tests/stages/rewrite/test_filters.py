"""Filters of rewrites, and how a shard of them is laid out: no sentence is lost."""

import io
import json

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import UserError
from stages.rewrite.filters import Filters, most_repeats
from stages.rewrite.rewrites import Rewrite, added, shard_files
from tests.support.models import make_sentences

SOURCE = "The old woman reads a small red book under the tree."


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        ("An old lady is reading a little book beneath a tree.", None),
        ("", "empty"),
        (" \t ", "empty"),
        ("An old lady\x1b[2J is reading a little book.", "control_characters"),
        ("An old lady\x9b2J is reading a little book.", "control_characters"),
        ("the old woman reads a small  red book under the tree.", "unchanged"),
        ("She reads.", "too_short"),
        (" ".join(["An old woman, or a lady, reads some book that is red."] * 4), "too_long"),
        ("The old woman reads a small red book under the trees.", "near_copy"),
        ("The woman reads reads reads reads a book.", "repeats"),
        ("The woman in the red in the red in the red in the red tree.", "repeats"),
        ("Старая женщина читает маленькую красную книгу.", "wrong_script"),
        ("Die alte Frau liest unter dem Baum ein kleines rotes Buch.", "wrong_language"),
    ],
)  # fmt: skip
def test_every_filter_has_its_reason(rewrite, reason):
    filters = Filters(max_similarity=0.97, language="en")
    assert filters.fault(SOURCE, rewrite) == reason


def test_filters_can_be_loosened():
    loose = Filters(min_growth=0, max_growth=100, max_similarity=1, max_repeats=99, script=None)
    for rewrite in ("She.", SOURCE + "!", "book " * 40, "Старая женщина", "Die alte Frau liest."):
        assert loose.fault(SOURCE, rewrite) is None
    assert loose.fault(SOURCE, SOURCE.upper()) == "unchanged"


@pytest.mark.parametrize(
    ("script", "rewrite"),
    [("HAN", "一位老太太在看书"), ("cyrillic", "Старая женщина"), ("Latin", "Die alte Frau.")],
)
def test_scripts_are_known_by_their_usual_names(script, rewrite):
    assert Filters(script=script, min_growth=0).fault(SOURCE, rewrite) is None
    assert Filters(script="GREEK", min_growth=0).fault(SOURCE, rewrite) == "wrong_script"


@pytest.mark.parametrize("script", ["LATTIN", "chinese"])
def test_what_no_letter_is_of_is_refused(script):
    with pytest.raises(ValueError, match=f"begins with '{script}'; "):
        Filters(script=script)


@pytest.mark.parametrize("language", ["EN", "eng"])
def test_a_language_that_is_never_found_is_refused(language):
    with pytest.raises(UserError, match=f"py3langid knows no '{language}'; .* en, "):
        Filters(language=language).check_packages("perturb[0].filters")


def test_a_sentence_that_repeats_itself_may_be_rewritten_so():
    assert (
        Filters().fault("no no no no no, he said to her", "no no no no no, was his reply") is None
    )


def test_short_text_is_not_judged_by_its_language():
    assert Filters(language="en", min_growth=0).fault(SOURCE, "Guten Tag, Herr") is None


@given(st.lists(st.sampled_from("ab"), max_size=12))
def test_repeats_are_counted_as_by_hand(words):
    def by_hand():
        most = 1
        for size in range(1, 5):
            for start in range(len(words)):
                count = 1
                while words[start : start + size] == words[
                    start + count * size : start + (count + 1) * size
                ] and start + (count + 1) * size <= len(words):
                    count += 1
                most = max(most, count)
        return most

    assert most_repeats(" ".join(words)) == by_hand()


def tables(files):
    return [
        pq.read_table(io.BytesIO(files[f"{name}.parquet"])).to_pylist()
        for name in ("rewrites", "rejects")
    ] + [json.loads(files["stats.json"])]


def test_every_sentence_is_kept_or_rejected_with_its_reason():
    texts = make_sentences(6)
    given_rewrites = [
        Rewrite(3, "A quite different thing is said in this one.", "And the opposite of it here."),
        Rewrite(0, texts[0]),
        Rewrite(2, "", reason="failed: HTTP 500"),
        Rewrite(3, "A quite different thing is said in this one."),
        Rewrite(4, "Something else is said in this one here.", "x"),
        Rewrite(3, "Yet another way to say the same thing."),
    ]
    kept, rejected, stats = tables(shard_files(texts, given_rewrites, Filters()))
    assert [(one["row"], one["text"], one["negative"]) for one in kept] == [
        (3, "A quite different thing is said in this one.", "And the opposite of it here."),
        (3, "Yet another way to say the same thing.", None),
        (4, "Something else is said in this one here.", None),
    ]
    assert [(one["row"], one["reason"]) for one in rejected] == [
        (0, "unchanged"), (1, "no_rewrite"), (2, "failed: HTTP 500"), (3, "duplicate"),
        (4, "negative_too_short"), (5, "no_rewrite"),
    ]  # fmt: skip
    assert stats["rewrites"] == 3 and stats["sentences_with_rewrite"] == 2
    assert stats["negatives"] == 1
    assert sum(stats["rejected"].values()) == len(rejected)
    assert added([stats, stats])["rejected"]["no_rewrite"] == 4
    assert added([stats, stats])["rewrites"] == 6


def test_text_that_was_cut_inside_a_letter_is_stored():
    one = Rewrite(0, "An odd \ud83d rewrite of it.", "Another \ude00 one of it.")
    files = shard_files(["A sentence about it."], [one], Filters())
    (row,) = pq.read_table(io.BytesIO(files["rewrites.parquet"])).to_pylist()
    assert row["text"] == "An odd ? rewrite of it." and row["negative"] == "Another ? one of it."
