"""Rank vectors: golden values, scipy, ties, compression and its error, Eq. 7."""

import io
import json
import resource
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.principal import band_error, similarity_error
from stages.ranks import corpus as corpus_module
from stages.ranks.corpus import (
    Ranker,
    check_corpus,
    corpus_files,
    exact_similarities,
    fit_basis,
    positions_of,
    sample_rows,
)
from stages.ranks.positions import rank_factor, rank_positions
from stages.ranks.settings import RanksSettings
from stages.ranks.similarity import (
    RankAwareEncoder,
    averaged_rank_factor,
    joined,
    load_student,
    write_vectors,
)
from stages.rows import FactorRows, unit_rows
from tests.support.models import make_sentences


def vectors(count, dimension=12, seed=0):
    return np.random.default_rng(seed).standard_normal((count, dimension), dtype=np.float32)


def test_positions_and_similarities_equal_golden_values(golden):
    inputs, expected = golden["inputs"], golden["expected"]
    corpus, sentences = np.array(inputs["corpus"]), np.array(inputs["teacher1"])
    positions = positions_of(sentences, unit_rows(corpus))
    np.testing.assert_array_equal(positions, expected["rank_positions_ascending_teacher1"])
    factor = rank_factor(positions)
    np.testing.assert_allclose(factor @ factor.T, expected["rank_similarity_teacher1"], atol=1e-6)


def test_similarity_is_spearmans_rho_over_ten_thousand_sentences():
    corpus, sentences = vectors(10_000, 384), vectors(3, 384, seed=1)
    factor = rank_factor(positions_of(sentences, unit_rows(corpus)))
    lists = unit_rows(sentences) @ unit_rows(corpus).T
    expected = spearmanr(lists, axis=1).statistic
    np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**6))
def test_positions_equal_a_stable_double_argsort(size, seed):
    """Few distinct values, both signs and both zeros: ties keep the order of the columns."""
    random = np.random.default_rng(seed)
    scores = random.choice([-1.5, -0.5, -0.0, 0.0, 0.25, 1.5], (4, size)).astype(np.float32)
    scores += 0.0  # one zero, as a sum of products gives it
    expected = np.argsort(np.argsort(scores, axis=1, kind="stable"), axis=1)
    np.testing.assert_array_equal(rank_positions(scores), expected)


def test_many_corpus_sentences_need_wider_positions():
    scores = np.arange(70_000, dtype=np.float32)[None]
    assert rank_positions(scores)[0, -1] == 69_999


def test_averaged_ranks_are_scipys_and_a_row_without_order_is_zero():
    scores = np.array([[0.1, 0.5, 0.1, 0.9], [0.3, 0.3, 0.3, 0.3]], dtype=np.float32)
    factor = averaged_rank_factor(scores)
    ranks = rankdata(scores[0]) - 2.5
    np.testing.assert_allclose(factor[0], ranks / np.linalg.norm(ranks), atol=1e-6)
    assert not factor[1].any()


def test_tiles_do_not_change_positions(monkeypatch):
    corpus, sentences = unit_rows(vectors(100)), vectors(33, seed=1)
    whole = positions_of(sentences, corpus)
    monkeypatch.setattr(corpus_module, "tile_rows", lambda n: 7)
    np.testing.assert_array_equal(positions_of(sentences, corpus), whole)


def low_rank_positions(count, n=300, seed=0):
    """Sentences that differ in a few directions, as real ones do."""
    corpus = unit_rows(vectors(n, 6, seed=9))
    return positions_of(vectors(count, 6, seed=seed), corpus)


def projected(positions, basis):
    return rank_factor(positions) @ basis


def measured_error(positions, basis):
    return similarity_error(exact_similarities(positions), projected(positions, basis))


def test_the_error_of_a_basis_is_that_of_the_products():
    basis = fit_basis(low_rank_positions(200), 20)
    held_out = low_rank_positions(50, seed=5)
    error = measured_error(held_out, basis)
    exact, short = rank_factor(held_out), projected(held_out, basis)
    above = np.triu_indices(50, 1)
    truth, difference = (exact @ exact.T)[above], (short @ short.T - exact @ exact.T)[above]
    assert error["rmse"] == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-3)
    assert error["max"] == pytest.approx(np.abs(difference).max(), rel=1e-3)
    inside = (truth >= 0.5) & (truth < 0.8)
    pairs, rmse = band_error(error, 0.5, 0.8)
    assert pairs == inside.sum() > 0
    assert rmse == pytest.approx(np.sqrt((difference[inside] ** 2).mean()), rel=1e-3)


def test_more_dimensions_err_less_and_no_other_basis_errs_less():
    fit = low_rank_positions(200)
    bases = {k: fit_basis(fit, k) for k in (2, 6, 20, 60)}
    errors = [measured_error(fit, basis)["rmse"] for basis in bases.values()]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05 < errors[0]
    np.testing.assert_allclose(bases[20].T @ bases[20], np.eye(20), atol=1e-3)
    other = np.linalg.qr(vectors(300, 6))[0]
    assert errors[1] < measured_error(fit, other)["rmse"]


def test_the_sample_is_a_function_of_size_and_seed_and_keeps_its_parts_apart():
    chosen = RanksSettings(corpus_size=50, dimensions=10)
    one = sample_rows(400, chosen)
    np.testing.assert_array_equal(one.corpus, sample_rows(400, chosen).corpus)
    assert set(one.corpus) != set(sample_rows(400, RanksSettings(corpus_size=50, seed=1)).corpus)
    assert len(set(one.corpus)) == 50
    assert not set(one.fit) & set(one.held_out)
    assert len(one.fit) == 360 and len(one.held_out) == 40
    assert not len(sample_rows(400, RanksSettings(corpus_size=50)).fit)


@pytest.mark.parametrize("dimensions", [None, 20])
def test_published_factors_give_the_similarities(tmp_path, dimensions):
    sentences = vectors(300, 8)
    chosen = RanksSettings(corpus_size=120, dimensions=dimensions)
    files, stats = corpus_files(lambda rows: unit_rows(sentences[rows]), 300, chosen, "m")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    corpus = np.load(tmp_path / "corpus.npy")
    basis = np.load(tmp_path / "basis.npy") if dimensions else None
    shards = []
    for number, start in enumerate((0, 200)):
        path = tmp_path / f"{number}.npy"
        path.write_bytes(Ranker(corpus, basis)(sentences[start : start + 200])["factors.npy"])
        shards.append(path)
    rows = np.array([3, 250, 199, 200])
    factors = FactorRows(shards, 200).take(rows)
    lists = unit_rows(sentences[rows]) @ unit_rows(corpus).T
    expected = spearmanr(lists, axis=1).statistic
    off = ~np.eye(4, dtype=bool)
    tolerance = 1e-6 if dimensions is None else 4 * stats["error"]["max"]
    np.testing.assert_allclose((factors @ factors.T)[off], expected[off], atol=tolerance)
    assert ("error" in stats) == (dimensions is not None)


def test_the_corpus_counts_by_direction_and_not_by_length(encoder):
    """Similarities are cosines whatever lengths the vectors have."""
    corpus, sentences = vectors(60), vectors(9, seed=1)
    longer = corpus * np.linspace(1, 5, 60, dtype=np.float32)[:, None]
    for basis in (None, np.linalg.qr(vectors(60, 4))[0]):
        assert Ranker(corpus, basis)(sentences) == Ranker(longer, basis)(sentences)
    corpus = encoder.encode_unit(make_sentences(60, seed=4))
    longer = corpus * np.linspace(1, 5, 60, dtype=np.float32)[:, None]
    one, two = (RankAwareEncoder(encoder, c, None, 1.0).encode(["a cat"]) for c in (corpus, longer))
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_a_compressed_shard_is_never_held_in_full_width(monkeypatch):
    """A shard of 8,192 rows over 100,000 corpus sentences would be 3 GB of positions."""
    widest = []
    real = corpus_module.rank_positions
    monkeypatch.setattr(corpus_module, "tile_rows", lambda n: 16)
    monkeypatch.setattr(corpus_module, "rank_positions", lambda s: widest.append(len(s)) or real(s))
    monkeypatch.setattr(corpus_module, "positions_of", None)
    corpus, basis = vectors(200), np.linalg.qr(vectors(200, 10))[0]
    made = Ranker(corpus, basis)(vectors(100, seed=1))["factors.npy"]
    assert np.load(io.BytesIO(made)).shape == (100, 10)
    assert max(widest) == 16


BAD = {
    "a corpus larger than the text": (
        lambda: sample_rows(99, RanksSettings(corpus_size=100)), "only 99 sentences"),
    "more dimensions than rows to fit": (
        lambda: sample_rows(60, RanksSettings(corpus_size=58, dimensions=57)), "only 54 rank"),
    "nothing to measure the error on": (
        lambda: sample_rows(19, RanksSettings(corpus_size=9, dimensions=3)), "no two are left"),
    "one vector for every sentence": (
        lambda: check_corpus(np.ones((5, 3)), "m"), "nothing to rank"),
    "a sentence without any order": (
        lambda: positions_of(np.array([[1.0, 0.0], [0.0, 0.0]]), vectors(9, 2)), "zero variance"),
    "another encoder's vectors": (
        lambda: positions_of(vectors(3, 8), vectors(9, 12)), "of 8 dimensions"),
    "fewer directions than dimensions": (
        lambda: fit_basis(np.repeat(low_rank_positions(3), 20, axis=0), 20), "span fewer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(name):
    make, expected = BAD[name]
    with pytest.raises(UserError, match=expected):
        make()


def test_duplicate_corpus_vectors_are_counted():
    assert check_corpus(np.array([[1, 0], [0, 1], [1, 0], [1, 0]]), "m") == 2


@pytest.fixture(scope="module")
def encoder(student_folder):
    chosen = EncoderSettings(model=str(student_folder), pooling="mean", max_length=32)
    return load_for_inference(chosen)


def test_rank_aware_similarity_is_equation_7(encoder):
    texts, corpus = make_sentences(6, seed=3), encoder.encode_unit(make_sentences(80, seed=4))
    unit = encoder.encode_unit(texts)
    rho = spearmanr(unit @ corpus.T, axis=1).statistic
    for weight in (0.0, 0.1, 1.0):
        found = RankAwareEncoder(encoder, corpus, None, weight).similarity(texts, texts)
        np.testing.assert_allclose(found, weight * rho + (1 - weight) * unit @ unit.T, atol=1e-5)
        assert found.dtype == np.float32


def test_equation_7_equals_its_golden_value(golden):
    inputs = {name: np.array(golden["inputs"][name]) for name in ("u", "v", "teacher1", "corpus")}
    factors = rank_factor(positions_of(inputs["teacher1"], unit_rows(inputs["corpus"])))
    left = joined(unit_rows(inputs["u"][:1]), factors[:1], 0.1)
    right = joined(unit_rows(inputs["v"][1:2]), factors[1:2], 0.1)
    expected = golden["expected"]["rankencoder_eq7_lambda0.1_pair01"]
    assert float(left[0] @ right[0]) == pytest.approx(expected, abs=1e-6)


def test_a_sentence_is_encoded_once_however_many_it_is_compared_with(encoder, monkeypatch):
    calls = []
    real = encoder.encode_unit
    monkeypatch.setattr(encoder, "encode_unit", lambda t, k: calls.extend(t) or real(t, k))
    corpus = real(make_sentences(30, seed=4))
    RankAwareEncoder(encoder, corpus, None, 0.1).similarity(["a cat"], make_sentences(9))
    assert len(calls) == 10


def test_vectors_of_another_encoder_are_refused(encoder):
    with pytest.raises(UserError, match="made by another encoder"):
        RankAwareEncoder(encoder, vectors(9, 5), None, 0.1).encode(["a cat"])


@pytest.mark.parametrize("length", [None, 20, 10**6])
def test_any_encoder_folder_can_be_asked(tmp_path, student_folder, length, monkeypatch):
    """max_seq_length null or beyond the model's 64 positions; a blank line; windows."""
    folder = shutil.copytree(student_folder, tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    model = load_student(folder)
    assert model.encoder.settings.max_length == (20 if length == 20 else 64)
    monkeypatch.setattr("stages.ranks.similarity.WINDOW_TEXTS", 2)
    texts = ["a cat", "", "the dog eats", "a " * 100, "a bird"]
    assert write_vectors(model, texts, tmp_path / "vectors.npy") == (5, 32)
    stored = np.load(tmp_path / "vectors.npy")
    np.testing.assert_allclose(stored, model.encode(texts), atol=1e-5)
    assert stored.dtype == np.float32
    with pytest.raises(UserError, match="exported without rank vectors"):
        load_student(folder, 0.5)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": "20"}')
    with pytest.raises(UserError, match="max_seq_length is '20', which is no number"):
        load_student(folder)
    with pytest.raises(UserError, match="cannot be written"):
        write_vectors(model, texts, tmp_path / "nowhere" / "vectors.npy")


def test_vectors_take_their_place_on_the_disk_as_they_come(tmp_path, monkeypatch):
    """A file as long as it will be, with holes, would be filled by a map: where the disk is full by
    then, the process is killed (SIGBUS) and its half file stays."""
    lengths = []

    class Model:
        def encode(self, texts, kinds=None):
            lengths.extend(file.stat().st_size for file in tmp_path.iterdir())
            return vectors(len(texts), 1000)

    monkeypatch.setattr("stages.ranks.similarity.WINDOW_TEXTS", 2)
    assert write_vectors(Model(), ["a"] * 6, tmp_path / "vectors.npy") == (6, 1000)
    assert lengths[-1] <= 2 * 2 * 4000 + 200
    assert np.load(tmp_path / "vectors.npy", mmap_mode="r").shape == (6, 1000)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    """Files are limited to 1 MB here: an error like any other that writing ends with."""

    class Model:
        def encode(self, texts, kinds=None):
            return vectors(len(texts), 1000)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match="vectors.npy: cannot be written .File too large"):
            write_vectors(Model(), ["a"] * 2000, tmp_path / "vectors.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []
