"""Pair files joined with the sentences that they rewrite."""

import errno
import json
import sqlite3

import pytest

from stages.errors import UserError
from stages.rewrite.pairs import PairFile, Pairs
from tests.support.models import make_sentences


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


def test_pairs_find_their_sentences(tmp_path, corpus):
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


@pytest.fixture
def small_database(monkeypatch):
    """Gives every database a setting of SQLite."""
    connect = sqlite3.connect

    def give(pragma):
        def connected(place):
            database = connect(place)
            database.execute(f"PRAGMA {pragma}")
            return database

        monkeypatch.setattr("sqlite3.connect", connected)

    return give


def many_pairs(file):
    """Three rewrites of each of 2,000 sentences, and the sentences in two shards."""
    sentences = [f"Sentence {number}." for number in range(2000)]
    rows = [(text, f"{text} {turn}") for turn in "abc" for text in sentences]
    path = write_table(file, ("sentence1", "sentence2"), rows)
    return Pairs(path=path), [sentences[:700], sentences[700:]]


def test_pairs_that_do_not_fit_into_memory_are_the_same(tmp_path, small_database):
    settings, corpus = many_pairs(tmp_path / "p.tsv")
    small_database("cache_size=1")  # pages
    shards, _ = joined(settings, corpus)
    found = [text for shard in shards for text in [rewrite.text for rewrite in shard]]
    assert found == [f"Sentence {number}. {turn}" for number in range(2000) for turn in "abc"]
    assert [shards[1][0].row, shards[1][-1].row] == [0, 1299]


def test_a_full_temporary_disk_is_the_error_that_it_is_elsewhere(tmp_path, small_database):
    settings, corpus = many_pairs(tmp_path / "p.tsv")
    small_database("max_page_count=5")
    with pytest.raises(OSError, match="disk is full") as caught:
        joined(settings, corpus)
    assert caught.value.errno == errno.ENOSPC


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
