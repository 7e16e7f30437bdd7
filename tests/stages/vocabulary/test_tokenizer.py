"""Cut tokenizers: the same tokens on the texts they were cut to, and some for any other text."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.train.student_settings import StudentSettings
from stages.vocabulary.settings import VocabularySettings
from stages.vocabulary.stage import Vocabulary
from stages.vocabulary.tokenizer import Merges, WholeTokenizer
from tests.support.models import make_model, make_sentences
from tests.support.tokenizers import ACCENTED, KINDS, UNUSED, train_text, train_tokenizer

TEXTS = [*make_sentences(60, seed=3), "naïve cat", "12.5% of the dogs"]


def counts_of(rust, texts):
    counts = np.zeros(max(rust.get_vocab().values()) + 1, dtype=np.int64)
    for one in rust.encode_batch(texts, add_special_tokens=False):
        np.add.at(counts, one.ids, 1)
    return counts


def cut(rust, texts=TEXTS, required=(), **settings):
    whole = WholeTokenizer(rust.to_str(), "tiny")
    chosen = whole.choose(counts_of(rust, texts), VocabularySettings(**settings), required)
    return whole.cut(chosen)


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """A tokenizer, and what is left of it."""
    whole = train_tokenizer(request.param).backend_tokenizer
    found = cut(whole)
    return whole, Tokenizer.from_str(found.text), found.kept


def test_the_corpus_has_the_same_tokens(pair):
    whole, small, kept = pair
    assert small.get_vocab_size() < 0.8 * whole.get_vocab_size()
    for text in TEXTS:
        for special in (False, True):
            was, now = (one.encode(text, add_special_tokens=special) for one in (whole, small))
            assert now.tokens == was.tokens
            assert kept[now.ids].tolist() == was.ids


def test_every_number_is_the_right_token(pair):
    whole, small, kept = pair
    assert sorted(small.get_vocab().values()) == [*range(len(kept))]
    for number, old in enumerate(kept):
        assert small.id_to_token(number) == whole.id_to_token(int(old))
    assert [one.content for one in small.get_added_tokens_decoder().values()] == [
        one.content for one in whole.get_added_tokens_decoder().values()
    ]


@given(text=st.text(max_size=40) | st.text(alphabet="catdoghuseriznü東の кот.%5", max_size=40))
def test_any_text_has_tokens_and_nothing_is_newly_unknown(pair, text):
    whole, small, kept = pair
    was, now = whole.encode(text), small.encode(text)
    assert all(number < len(kept) for number in now.ids)
    assert (now.ids[0], now.ids[-1]) == tuple(kept.tolist().index(was.ids[i]) for i in (0, -1))
    unknown = {"[UNK]", "<unk>"}
    assert unknown & {*was.tokens} or not unknown & {*now.tokens}
    if whole.decoder is None and not unknown & {*was.tokens}:
        assert "".join(now.tokens).replace("##", "") == "".join(was.tokens).replace("##", "")


@pytest.mark.parametrize("kind", KINDS)
def test_rare_tokens_go_and_their_characters_stay(kind):
    whole = train_tokenizer(kind).backend_tokenizer
    assert UNUSED not in Tokenizer.from_str(cut(whole).text).get_vocab()
    sizes = [len(cut(whole, min_count=count).kept) for count in (1, 5, 50)]
    assert sizes[0] > sizes[1] > sizes[2]
    small = Tokenizer.from_str(cut(whole, min_count=50).text)
    for text in ACCENTED:
        assert not {"[UNK]", "<unk>"} & {*small.encode(text).tokens} - {*whole.encode(text).tokens}


@pytest.mark.parametrize("kind", KINDS)
def test_characters_of_rare_words_stay_where_those_of_the_texts_do(kind):
    """A word that is dropped for its rarity is read in shorter pieces."""
    whole = train_tokenizer(kind).backend_tokenizer
    texts = [*TEXTS, *["the cat sees the dog"] * 40]
    small = Tokenizer.from_str(cut(whole, texts, min_count=40, characters="corpus").text)
    for text in texts:
        assert not {"[UNK]", "<unk>"} & {*small.encode(text).tokens} - {*whole.encode(text).tokens}


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_keeps_the_most_frequent(kind):
    whole = train_tokenizer(kind).backend_tokenizer
    least = len(cut(whole, min_count=int(counts_of(whole, TEXTS).max())).kept)
    found = cut(whole, size=least + 20)
    assert least + 10 < len(found.kept) <= least + 20
    counts = counts_of(whole, TEXTS)
    forced = {*cut(whole, min_count=int(counts.max())).kept.tolist()}
    chosen = {*found.kept.tolist()} - forced
    missing = {*np.flatnonzero(counts).tolist()} - {*found.kept.tolist()}
    if kind != "BPE":  # which keeps parts of tokens too
        assert min(counts[[*chosen]]) >= max(counts[[*missing]])
    with pytest.raises(UserError, match=r"size: 9,999 is more than the \d+ tokens of model 'tiny'"):
        WholeTokenizer(whole.to_str(), "tiny").check_size(VocabularySettings(size=9999))
    with pytest.raises(UserError, match="size: 4 is less than the"):
        cut(whole, size=4)


def test_a_tokenizer_that_is_not_understood_is_said_at_once(tmp_path):
    model = make_model(tmp_path / "model")
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "Newer"}}))
    student = EncoderSource(StudentSettings(model=str(model), pooling="mean", max_length=24))
    with pytest.raises(UserError, match="model '.*/model': cannot be loaded"):
        Vocabulary(student, VocabularySettings(size=20), ()).check()


def test_characters_of_other_scripts_may_go():
    for kind in ("WordPiece", "Unigram"):
        whole = train_tokenizer(kind).backend_tokenizer
        found = Tokenizer.from_str(cut(whole, characters="corpus").text)
        assert "東" in whole.get_vocab() and "東" not in found.get_vocab()
        assert [found.encode(text).tokens for text in TEXTS] == [
            whole.encode(text).tokens for text in TEXTS
        ]
    bytes_ = train_tokenizer("BPE").backend_tokenizer
    found = Tokenizer.from_str(cut(bytes_, characters="corpus").text)
    assert {*pre_tokenizers.ByteLevel.alphabet()} <= found.get_vocab().keys()


def test_bytes_stand_in_for_characters():
    """As in Llama's and Gemma's SentencePiece BPE."""
    alphabet = [f"<0x{number:02X}>" for number in range(256)]
    words = ["<unk>", *alphabet, "a", "b", "ab", "abab", "東", "京", "東京"]
    merges = [("a", "b"), ("ab", "ab"), ("東", "京")]
    vocabulary = {token: number for number, token in enumerate(words)}
    rust = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    found = cut(rust, ["abab"])
    small = Tokenizer.from_str(found.text)
    assert small.encode("abab").tokens == ["abab"]
    assert {"a", "b", "ab"} < small.get_vocab().keys() and "東" not in small.get_vocab()
    assert len(small.encode("東").tokens) == 3 and "<unk>" not in small.encode("東").tokens


def test_a_bpe_keeps_the_steps_to_its_tokens_and_no_others():
    """Two ways lead to `abc`; only one of them is taken."""
    model = {"merges": [["b", "c"], ["a", "b"], ["ab", "c"], ["a", "bc"], ["x", "yz"]]}
    merges = Merges(model)
    assert merges.steps("abc") == {"a", "b", "c", "bc", "abc"}
    assert merges.steps("xyz") == set()
    ends = Merges({"merges": [["t", "o</w>"]], "end_of_word_suffix": "</w>"})
    assert ends.steps("to</w>") == {"t", "o</w>", "to</w>"}
    inner = Merges({"merges": [["##a", "##b"], ["x", "##ab"]], "continuing_subword_prefix": "##"})
    assert inner.steps("xab") == {"x", "##a", "##b", "##ab", "xab"}


def test_whole_words_that_no_merges_make_stay():
    """`ignore_merges`, as in Llama 3."""
    words = {token: number for number, token in enumerate(["a", "b", "c", "bc", "abc", "cab"])}
    rust = Tokenizer(models.BPE(words, [("b", "c")], ignore_merges=True))
    small = Tokenizer.from_str(cut(rust, ["abc"]).text)
    assert small.encode("abc").tokens == ["abc"] and "cab" not in small.get_vocab()


def test_the_least_score_stays():
    """It says what an unknown character costs: here more than two rare pieces."""
    pieces = [("<unk>", 0.0), ("a", -1.0), ("axb", -18.0), ("b", -1.0), ("rare", -30.0)]
    rust = Tokenizer(models.Unigram(pieces, unk_id=0))
    assert rust.encode("axb").tokens == ["axb"]
    small = Tokenizer.from_str(cut(rust, ["axb", "ab"]).text)
    assert "rare" in small.get_vocab()
    assert small.encode("axb").tokens == ["axb"]


def test_numbers_with_gaps_and_tokens_required(tmp_path):
    whole = train_tokenizer("WordPiece").backend_tokenizer
    raw = json.loads(whole.to_str())
    raw["model"]["vocab"]["house"] = 5000
    rust = Tokenizer.from_str(json.dumps(raw))
    found = cut(rust, required=[rust.token_to_id(UNUSED), 4999])
    small = Tokenizer.from_str(found.text)
    assert small.token_to_id(UNUSED) is not None
    assert found.kept[small.token_to_id("house")] == 5000
    assert small.get_vocab_size() == len(found.kept)


def test_what_cannot_be_cut():
    words = {token: number for number, token in enumerate(["[UNK]", "a"])}
    rust = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    with pytest.raises(UserError, match="is a WordLevel, and those that can be cut are WordPiece"):
        WholeTokenizer(rust.to_str(), "tiny")
    with pytest.raises(UserError, match=r"min_count: 100000: no token occurs so often \(the most"):
        cut(train_tokenizer("WordPiece").backend_tokenizer, min_count=100_000)


def test_training_text_is_wider_than_the_corpus():
    assert {*TEXTS} - {*train_text()}
