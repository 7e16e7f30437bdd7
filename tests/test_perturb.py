"""Filters, pair files, and how a shard of rewrites is laid out: no row is lost."""

import io
import json

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stages.perturb.pairs as pairs_module
from stages.errors import UserError
from stages.perturb.filters import QualityFilter, most_repeats
from stages.perturb.pairs import PairFile
from stages.perturb.rewrites import Rewrite, added, shard_files
from stages.perturb.settings import Filters, Pairs
from tests.conftest import make_sentences

SOURCE = "The old woman reads a small red book under the tree."


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        ("An old lady is reading a little book beneath a tree.", None),
        ("", "empty"),
        (" \t ", "empty"),
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
    judge = QualityFilter(Filters(max_similarity=0.97, language="en"))
    assert judge(SOURCE, rewrite) == reason


def test_filters_can_be_loosened():
    loose = QualityFilter(
        Filters(min_growth=0, max_growth=100, max_similarity=1, max_repeats=99, script=None)
    )
    for rewrite in ("She.", SOURCE + "!", "book " * 40, "Старая женщина", "Die alte Frau liest."):
        assert loose(SOURCE, rewrite) is None
    assert loose(SOURCE, SOURCE.upper()) == "unchanged"


def test_a_sentence_that_repeats_itself_may_be_rewritten_so():
    judge = QualityFilter(Filters())
    assert judge("no no no no no, he said to her", "no no no no no, was his reply") is None


def test_short_text_is_not_judged_by_its_language():
    assert QualityFilter(Filters(language="en", min_growth=0))(SOURCE, "Guten Tag, Herr") is None


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
    kept, rejected, stats = tables(shard_files(texts, given_rewrites, QualityFilter(Filters())))
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
    files = shard_files(["A sentence about it."], [one], QualityFilter(Filters()))
    (row,) = pq.read_table(io.BytesIO(files["rewrites.parquet"])).to_pylist()
    assert row["text"] == "An odd ? rewrite of it." and row["negative"] == "Another ? one of it."


# --- pair files ---------------------------------------------------------------------------------


@pytest.fixture
def corpus():
    sentences = make_sentences(10)
    return [sentences[:4], sentences[4:8], sentences[8:]]


def write_table(file, header, rows):
    file.write_text("\n".join("\t".join(map(str, row)) for row in [header, *rows]) + "\n")
    return str(file)


def joined(settings, corpus):
    pairs = PairFile(settings, iter(corpus), "NFC", "perturb[0].pairs")
    return list(pairs.shards()), pairs


@pytest.mark.parametrize("memory", [1 << 28, 1])
def test_pairs_find_their_sentences(tmp_path, corpus, monkeypatch, memory):
    monkeypatch.setattr(pairs_module, "MEMORY_BYTES", memory)
    rows = [
        (corpus[2][1], "last one"), (corpus[0][0], "first, a"), (f"  {corpus[1][2]} ", "middle"),
        (corpus[0][0], "first, b"),
    ]  # fmt: skip
    path = write_table(tmp_path / "p.tsv", ("sentence1", "sentence2"), rows)
    shards, pairs = joined(Pairs(path=path), corpus)
    found = [[(one.row, one.text) for one in shard] for shard in shards]
    assert found == [[(0, "first, a"), (0, "first, b")], [(2, "middle")], [(1, "last one")]]
    assert pairs.num_unknown == 0


def test_pairs_are_joined_by_id_with_negatives(tmp_path, corpus):
    file = tmp_path / "p.jsonl"
    rows = [{"id": 9, "r": "nine", "n": "not nine"}, {"id": "4", "r": "four", "n": None}]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = Pairs(path=str(file), sentence_column=None, id_column="id", rewrite_column="r",
                     negative_column="n")  # fmt: skip
    shards, _ = joined(settings, corpus)
    assert [[(o.row, o.text, o.negative) for o in shard] for shard in shards] == [
        [], [(0, "four", None)], [(1, "nine", "not nine")]
    ]  # fmt: skip


def test_a_negative_may_be_missing_in_any_kind_of_file(tmp_path, corpus):
    settings = {"sentence_column": None, "id_column": "id", "rewrite_column": "r",
                "negative_column": "n"}  # fmt: skip
    (tmp_path / "p.tsv").write_text("id\tr\tn\n1\tone\n2\ttwo\tnot two\n3\n")
    shards, pairs = joined(Pairs(path=str(tmp_path / "p.tsv"), **settings), corpus)
    assert [(one.text, one.negative) for one in shards[0]] == [("one", None), ("two", "not two")]
    assert pairs.num_unknown == 1  # the line without a rewrite
    rows = [{"id": 1, "r": "one \ud83d"}, {"id": 2, "r": "two", "n": "not two"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shards, _ = joined(Pairs(path=str(tmp_path / "p.jsonl"), **settings), corpus)
    assert [(one.text, one.negative) for one in shards[0]] == [("one ?", None), ("two", "not two")]


@pytest.mark.parametrize("key", ["10", "-1", "x", ""])
def test_an_id_that_is_not_there_is_an_error(tmp_path, corpus, key):
    path = write_table(tmp_path / "p.tsv", ("id", "r"), [(3, "three"), (key, "who?")])
    settings = Pairs(path=path, sentence_column=None, id_column="id", rewrite_column="r")
    with pytest.raises(UserError, match="a pair whose id is not in the corpus: '"):
        joined(settings, corpus)


def test_unknown_sentences_are_an_error_or_counted_as_asked(tmp_path, corpus):
    rows = [("Nobody said this.", "This was said."), (corpus[0][1], "known")]
    path = write_table(tmp_path / "p.tsv", ("sentence1", "sentence2"), rows)
    with pytest.raises(UserError, match="'Nobody said this.'.*unknown: reject"):
        joined(Pairs(path=path), corpus)
    shards, pairs = joined(Pairs(path=path, unknown="reject"), corpus)
    assert [len(shard) for shard in shards] == [1, 0, 0]
    assert pairs.unknown == [
        {"reason": "unknown_sentence", "text": "Nobody said this. -> This was said."}
    ]


def test_a_file_of_other_sentences_is_an_error_even_if_unknown_ones_are_dropped(tmp_path, corpus):
    path = write_table(tmp_path / "p.tsv", ("sentence1", "sentence2"), [("Who?", "What?")])
    with pytest.raises(UserError, match="none of the 1 pairs .* check sentence_column"):
        joined(Pairs(path=path, unknown="reject"), corpus)


def test_a_table_without_the_columns_and_a_text_file_are_errors(tmp_path, corpus):
    path = write_table(tmp_path / "p.tsv", ("a", "b"), [("Who?", "What?")])
    with pytest.raises(UserError, match="no column 'sentence1'; it has a, b.*perturb\\[0\\].pairs"):
        joined(Pairs(path=path), corpus)
    (tmp_path / "p.txt").write_text("Who?\n")
    with pytest.raises(UserError, match="a text file has no columns"):
        joined(Pairs(path=str(tmp_path / "p.txt")), corpus)
