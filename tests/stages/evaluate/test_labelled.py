"""Tests on tables with labels, against scikit-learn, trec_eval and slow twins."""

import json
from itertools import chain

import numpy as np
import pytest
import pytrec_eval
import scipy.stats
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, ndcg_score, v_measure_score

from stages.errors import UserError
from stages.evaluate import base
from stages.evaluate.classification import ClassificationTest, sampled, score_classification
from stages.evaluate.clustering import (
    PLANE,
    ClusteringTest,
    in_plane,
    score_clustering,
    v_measure_by_text,
)
from stages.evaluate.corpora import Corpus, CorpusTest, score_corpus
from stages.evaluate.geometry import GeometrySettings
from stages.evaluate.pairs import PairsTest, score_pairs
from stages.evaluate.ranking import RankingTest, score_ranking
from stages.evaluate.relevance import ndcg
from stages.evaluate.reranking import Candidates, RerankingTest, score_reranking
from stages.evaluate.resampling import interval
from stages.evaluate.settings import EvaluateSettings
from stages.evaluate.tables import Labelled
from stages.rows import unit_rows


def encode(texts, kinds=None):
    """Unit vectors that depend on the text alone; coarse, so that some pairs tie."""
    rows = [np.random.default_rng(list(text.encode())).integers(-2, 3, 3) for text in texts]
    return unit_rows(np.array(rows) + 0.5)


def values_of(result):
    return {figure.name: figure.value for figure in result.figures}


def write(file, lines):
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_golden_ranking(golden):
    gold, predicted = (np.array(golden["inputs"][name]) for name in ("gold", "pred"))
    place = {"x": [1.0, 0.0], **{str(i): [p, 0.0] for i, p in enumerate(predicted)}}
    tested = base.Tested(lambda texts, kinds=None: np.array([place[text] for text in texts]), None)
    group = ("x", [str(i) for i in range(len(gold))], gold)
    found = values_of(score_ranking("y", [group], tested, "linear"))
    assert found["KCC y"] == pytest.approx(100 * golden["expected"]["kendall_tau_b"], rel=1e-6)
    assert found["NDCG y"] == pytest.approx(100 * golden["expected"]["ndcg_linear_gain"], rel=1e-6)
    other = values_of(score_ranking("y", [group], tested, "exponential"))["NDCG y"]
    assert other == pytest.approx(100 * ndcg_score([2**gold - 1], [predicted]))
    assert other != pytest.approx(found["NDCG y"])


def test_groups_are_a_sentences_partners_on_both_sides(tmp_path):
    pairs = ["a b 1", "a c 2", "d a 3", "e a 4", "a b 3", "b c 1", "b d 1", "b e 1", "f f 5"]
    lines = ["sentence1\tsentence2\tscore", *["\t".join(pair.split()) for pair in pairs]]
    test = RankingTest(name="x", path=write(tmp_path / "sts.tsv", lines))
    groups = {one: dict(zip(others, gold, strict=True)) for one, others, gold in test.load()}
    # b: partners a (mean of two), c, d and e. c, d and e have two each, f only itself
    assert groups == {
        "a": {"b": 2, "c": 2, "d": 3, "e": 4},
        "b": {"a": 2, "c": 1, "d": 1, "e": 1},
    }
    assert len(RankingTest(name="x", path=test.path, min_partners=2).load()) == 5  # not f
    found = values_of(test.score(base.Tested(encode, None), _Work()))
    taus = []
    for one, others in groups.items():
        cosines = [float(encode([one])[0] @ encode([other])[0]) for other in others]
        taus.append(scipy.stats.kendalltau(cosines, list(others.values())).statistic)
    assert found["KCC x"] == pytest.approx(100 * np.mean(np.nan_to_num(taus)))


def test_reranking_equals_trec_eval(tmp_path):
    random = np.random.default_rng(0)
    lines, qrel, run = ["query\tcandidate\tlabel\tsplit"], {}, {}
    for query in range(40):
        name = f"query {query}"
        labels = random.integers(0, 2, 12)
        if len(set(labels)) == 2:
            qrel[name] = {f"{place:09}": int(label) for place, label in enumerate(labels)}
            texts = [f"{query} {place}" for place in range(12)]
            scores = encode([name]) @ encode(texts).T
            run[name] = {f"{p:09}": float(score) for p, score in enumerate(scores[0])}
        lines += [f"{name}\t{query} {place}\t{x}\ttest" for place, x in enumerate(labels)]
    lines += ["all right\ta\t1\ttest", "of train\tb\t1\ttrain", "of train\tc\t0\ttrain"]
    test = RerankingTest(name="x", path=write(tmp_path / "rerank.tsv", lines), split="test")
    assert len(test.load()) == len(qrel)
    found = values_of(score_reranking("x", test.load(), base.Tested(encode, None)))
    expected = pytrec_eval.RelevanceEvaluator(qrel, {"map", "recip_rank"}).evaluate(run).values()
    assert found["MAP x"] == pytest.approx(100 * np.mean([one["map"] for one in expected]))
    ranks = [one["recip_rank"] for one in expected]
    assert found["MRR@10 x"] == pytest.approx(
        100 * np.mean(np.where(np.array(ranks) < 0.1, 0, ranks))
    )


@pytest.mark.parametrize("block", [7, 110, 65536])
def test_search_in_a_corpus_equals_trec_eval(tmp_path, monkeypatch, block):
    monkeypatch.setattr("stages.evaluate.corpora.DOCUMENT_ROWS", block)
    monkeypatch.setattr("stages.evaluate.corpora.QUERY_ROWS", 3)
    random = np.random.default_rng(1)
    documents = {f"d{i}": f"text {i}" for i in range(250)}
    queries = {f"q{i}": f"query {i}" for i in range(10)}
    qrel = {
        query: {str(d): int(random.integers(1, 4)) for d in random.choice(list(documents), 5)}
        for query in list(queries)[:-1]
    }
    scored = {(q, d): gain for q, gains in qrel.items() for d, gain in gains.items()}
    test = CorpusTest(
        name="x",
        queries=write(
            tmp_path / "queries.jsonl",
            [json.dumps({"_id": one, "text": text}) for one, text in queries.items()],
        ),
        documents=write(
            tmp_path / "corpus.jsonl",
            [json.dumps({"_id": d, "title": t[:4], "text": t[5:]}) for d, t in documents.items()],
        ),
        relevance=write(
            tmp_path / "qrels.tsv",
            ["query-id\tcorpus-id\tscore", *[f"{q}\t{d}\t{x}" for (q, d), x in scored.items()],
             "q9\td1\t0"],
        ),
    )  # fmt: skip
    corpus = test.load()
    assert corpus.documents == documents
    lines = [",_id,text", *[f"{n},{one},{text}" for n, (one, text) in enumerate(queries.items())]]
    by_pandas = write(tmp_path / "queries.csv", lines)  # with its index
    assert test.model_copy(update={"queries": by_pandas}).load() == corpus
    qrels = [f"{q} 0 {d} {gain}" for (q, d), gain in scored.items()]
    trec = test.model_copy(update={"relevance": write(tmp_path / "x.qrels", qrels)})
    assert trec.load() == corpus
    write(tmp_path / "x.qrels", [*qrels, "q1 d1 1"])
    with pytest.raises(UserError, match=f"line {len(qrels) + 1} has not the four columns"):
        trec.load()
    found = values_of(score_corpus("x", corpus, base.Tested(encode, None)))
    scores = encode(list(queries.values())) @ encode(list(documents.values())).T
    run = {q: {d: float(scores[i, j]) for j, d in enumerate(documents)}
           for i, q in enumerate(queries) if q in qrel}  # fmt: skip
    names = {"nDCG@10": "ndcg_cut_10", "R@10": "recall_10", "R@100": "recall_100"}
    measures = {"ndcg_cut.10", "recall.10,100", "recip_rank"}
    expected = list(pytrec_eval.RelevanceEvaluator(qrel, measures).evaluate(run).values())
    for name, theirs in names.items():
        mean = np.mean([one[theirs] for one in expected])
        assert found[f"{name} x"] == pytest.approx(100 * mean), name
    ranks = np.array([one["recip_rank"] for one in expected])
    assert found["MRR@10 x"] == pytest.approx(100 * np.where(ranks < 0.0999, 0, ranks).mean())


def test_ndcg_cuts_both_lists():
    assert ndcg(np.array([0.0, 2, 1]), [1, 2, 3], 2) == pytest.approx(
        (2 / np.log2(3)) / (3 + 2 / np.log2(3))
    )


def write_labelled(file, num_labels=3, count=90, splits=("train", "test")):
    lines = ["text\tlabel\tsplit"]
    for row in range(count):
        for split in splits:
            lines.append(f"{row % num_labels} {row} {split}\tl{row % num_labels}\t{split}")
    return write(file, lines)


def by_label(texts, kinds=None):
    """A vector near its label's place."""
    return np.array([np.eye(8)[int(text[0])] + encode([text])[0][0] / 9 for text in texts])


def test_classification_is_logistic_regression_on_mtebs_draws(tmp_path):
    test = ClassificationTest(
        name="x", path=write_labelled(tmp_path / "x.tsv"), samples_per_label=2
    )
    splits = test.load()
    result = test.score(base.Tested(encode, None), _Work())
    (figure,) = result.figures
    train, labels = splits["train"], splits["train"].labels
    order, expected = list(range(len(labels))), []
    right = np.zeros(len(splits["test"].labels))
    for _ in range(10):
        np.random.RandomState(42).shuffle(order)
        first = [[r for r in order if labels[r] == label][:2] for label in range(3)]
        rows = sorted(chain(*first), key=order.index)
        model = LogisticRegression(max_iter=100)
        model.fit(encode([train.texts[row][0] for row in rows]), labels[rows])
        answers = model.predict(encode([text for (text,) in splits["test"].texts]))
        expected.append(100 * (answers == splits["test"].labels).mean())
        right += (answers == splits["test"].labels) / 10
    np.testing.assert_allclose(result.items["x"].values.mean(1), right)
    assert figure.value == pytest.approx(np.mean(expected))
    assert figure.interval == pytest.approx((min(expected), max(expected)))
    assert [len(draw) for draw in sampled(labels, 2, 3)] == [6, 6, 6]
    perfect = lambda texts, kinds=None: by_label(texts)  # noqa: E731
    (figure,) = score_classification("x", splits, perfect, 8, 3).figures
    assert figure.value == 100


def test_clusters_are_found_where_there_are_any(tmp_path):
    test = ClusteringTest(name="x", path=write_labelled(tmp_path / "x.tsv"))
    result = test.score(base.Tested(by_label, None), _Work())
    assert json.loads(result.files[PLANE])["names"]
    (found,) = result.figures
    assert found.value == pytest.approx(100) and found.interval == pytest.approx((100, 100))
    (blind,) = score_clustering("x", test.load(), encode, 5).figures
    assert blind.value < 15 and blind.interval[0] < blind.value < blind.interval[1]


def test_texts_lie_in_the_plane_of_their_principal_components():
    """Against scikit-learn's, of the ten most frequent of twelve labels; vectors may be wider than
    there are texts."""
    random = np.random.default_rng(0)
    labels = random.permutation(np.repeat(np.arange(12), [80] * 5 + [5] + [90] * 5 + [9]))
    examples = Labelled([("a",)] * 864, labels, [f"label {number}" for number in range(12)])
    for width in (16, 1200):
        vectors = random.standard_normal((12, width))[labels] + 3
        vectors = (vectors + random.standard_normal(vectors.shape)).astype(np.float32)
        found = in_plane(vectors, examples)
        kept = np.setdiff1d(np.arange(12), [5, 11])
        assert found["names"] == [f"label {number}" for number in kept]
        assert found["num_labels"] == 12
        rows = np.flatnonzero(np.isin(labels, kept))
        analysis = PCA(2).fit(vectors[rows].astype(np.float64))
        assert found["share"] == pytest.approx(100 * analysis.explained_variance_ratio_.sum())
        *points, names = np.array(found["points"]).T
        np.testing.assert_array_equal(kept[names.astype(int)], labels[rows])
        expected = analysis.transform(vectors[rows]).T
        for own, other in zip(points, expected / np.abs(expected).max(), strict=True):
            assert own[np.abs(own).argmax()] > 0
            np.testing.assert_allclose(np.abs(own), np.abs(other), atol=1e-3)
            assert abs(np.corrcoef(own, other)[0, 1]) == pytest.approx(1)


def test_texts_in_the_plane_are_any_of_many():
    """A thousand; also where neighbours in the file alternate, or there is a single number."""
    labels = np.arange(1999) % 2
    numbers = 1e-6 * labels[:, None]
    found = in_plane(numbers, Labelled([("a",)] * 1999, labels, ["a", "b"]))
    x, y, names = np.array(found["points"]).T
    assert len(x) == 1000 and 400 < names.sum() < 600 and found["share"] == pytest.approx(100)
    assert len(np.unique(x[names == 0])) == 1 and np.ptp(x) > 1 and not y.any()
    alike = in_plane(np.ones((3, 4)), Labelled([("a",)] * 3, np.arange(3), ["x", "y", "z"]))
    assert alike["share"] == 0 and len(alike["points"]) == 3


def test_what_v_measure_is_compared_by_is_that_of_leaving_out_each_text():
    """Slow twin: scikit-learn's without each; and the error is that of samples of texts."""
    random = np.random.default_rng(0)

    def sample(size):
        labels = random.integers(0, 6, size)
        return labels, np.where(random.random(size) < 0.7, labels, random.integers(0, 5, size))

    def left_out(labels, clusters):
        kept = ~np.eye(len(labels), dtype=bool)
        return np.array([v_measure_score(labels[rows], clusters[rows]) for rows in kept])

    labels, clusters = sample(50)
    without = left_out(labels, clusters)
    expected = v_measure_score(labels, clusters) + 49 * (without.mean() - without)
    np.testing.assert_allclose(v_measure_by_text(labels, clusters), expected, atol=1e-9)
    lone = np.array([0] * 9 + [1])
    assert left_out(lone, lone).tolist() == [1] * 10
    np.testing.assert_allclose(v_measure_by_text(lone, lone), 1)
    several = [v_measure_by_text(*sample(400)) for _ in range(200)]
    error = np.mean([one.std(ddof=1) / 20 for one in several])
    assert error == pytest.approx(np.std([one.mean() for one in several]), rel=0.15)


def test_runs_of_k_means_that_fall_out_otherwise_are_no_difference():
    """The same vectors but for a turn and some noise: of twenty pairs about one may differ."""
    clear = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 20, 1000)
        vectors = 0.8 * random.standard_normal((20, 16))[labels] + random.standard_normal(
            (1000, 16)
        )
        turned = vectors @ np.linalg.qr(random.standard_normal((16, 16)))[0]
        texts = [(str(row),) for row in range(1000)]
        examples = Labelled(texts, labels, [str(label) for label in range(20)])
        resampled = [
            score_clustering("x", examples, lambda texts, kinds=None, own=own: own, 5)
            .items["V x"]
            .resampled(400)
            for own in (vectors, turned + 1e-3 * random.standard_normal(turned.shape))
        ]
        low, high = interval(resampled[1] - resampled[0])
        clear += low > 0 or high < 0
    assert clear <= 4


def test_average_precision_of_pairs_is_scikit_learns(tmp_path):
    lines = ["sentence1\tsentence2\tlabel", *[f"a{i}\tb{i % 7}\t{i % 3 // 2}" for i in range(60)]]
    test = PairsTest(name="x", path=write(tmp_path / "x.tsv", lines))
    (figure,) = score_pairs("x", test.load(), base.Tested(encode, None)).figures
    similarities = [float(encode([a])[0] @ encode([b])[0]) for a, b in test.load().texts]
    expected = average_precision_score([i % 3 // 2 for i in range(60)], similarities)
    assert figure.value == pytest.approx(100 * expected)
    assert figure.interval[0] < figure.value < figure.interval[1]


def test_a_teachers_documents_are_used_where_there_are_two_sides(tmp_path):
    """Queries of the student, documents of its teacher, whose vectors are the opposite here."""

    def opposite(texts, kinds=None):
        return -encode(texts)

    lines = ["sentence1\tsentence2\tlabel", *[f"a{i}\tb{i}\t{i % 2}" for i in range(30)]]
    pairs = PairsTest(name="x", path=write(tmp_path / "x.tsv", lines)).load()
    own = values_of(score_pairs("x", pairs, base.Tested(encode, None)))
    other = values_of(score_pairs("x", pairs, base.Tested(encode, None, opposite)))
    assert own != other
    tested = base.Tested(encode, None, opposite)
    candidates = Candidates("q", ["a", "b", "c"], np.array([True, False, False]))
    order = np.argsort(encode(["q"])[0] @ opposite(["a", "b", "c"]).T)[::-1]
    found = values_of(score_reranking("x", [candidates], tested))
    assert found["MRR@10 x"] == pytest.approx(100 / (1 + order.tolist().index(0)))
    corpus = Corpus({"1": "q"}, {"a": "a", "b": "b", "c": "c"}, {"1": {"a": 1.0}})
    assert values_of(score_corpus("x", corpus, tested))["MRR@10 x"] == found["MRR@10 x"]
    group = ("q", ["a", "b", "c"], np.array([1.0, 2, 3]))
    same, turned = (
        values_of(score_ranking("x", [group], one, "linear"))["KCC x"]
        for one in (base.Tested(encode, None), tested)
    )
    assert same == pytest.approx(-turned) and same != 0


def test_vectors_that_are_not_finite_are_an_error(tmp_path):
    def broken(texts, kinds=None):
        return encode(texts) * [[np.nan if text == "a3" else 1.0] for text in texts]

    lines = ["sentence1\tsentence2\tlabel", *[f"a{i}\tb{i}\t{i % 2}" for i in range(30)]]
    pairs = PairsTest(name="x", path=write(tmp_path / "x.tsv", lines)).load()
    with pytest.raises(UserError, match="vector of 'a3' is not finite"):
        score_pairs("x", pairs, base.Tested(broken, None))


BAD = [
    (RerankingTest, ["query\tcandidate\tlabel", "q\ta\t1", "q\tb\t2"], "row 2: the label is '2'"),
    (RerankingTest, ["query\tcandidate\tlabel", "q\ta\t1", "\tb\t0"], "row 2: 'query' is empty"),
    (RerankingTest, ["query\tcandidate\tlabel", "q\ta\t1", "q\tb\t1"], "of 1 queries none has"),
    (RerankingTest, ["query\tcandidate\tlabel", "q\ta\t1\tmore"], "row 1: there are more cells"),
    (PairsTest, ["text\tlabel", "a\t1", "b\t0"], "needs 'sentence1' and 'sentence2'"),
    (PairsTest, ["sentence1\tsentence2\tlabel", "a\tb\tyes", "a\tc\tno"], "labels are no, yes"),
    (PairsTest, ["sentence1\tsentence2\tlabel", "a\tb\t1"], "all rows have the label '1'"),
    (ClassificationTest, ["text\tlabel", "a\tx", "b\ty"], "no rows with split 'train'"),
    (ClassificationTest, ["text\tlabel\tsplit", "a\tx\ttrain", "b\ty\ttest"], "'y' is tested"),
    (ClusteringTest, ["sentence1\tsentence2\tlabel", "a\tb\t1"], "this test needs a column 'text'"),
    (RankingTest, ["sentence1\tsentence2\tscore", *[f"a\tb{i}\t{i - 2}" for i in range(5)]],
     "gold score of -2"),
    (ClusteringTest, ["text\tlabel"], "there are no rows"),
    (ClusteringTest, ["text\tlabel", "a\tx", "b\tx"], "all rows have the label 'x'"),
    (ClusteringTest, ["text\tlabel", "a\tx", "b\ty"], "no two texts share a label"),
    (GeometrySettings, ["sentence1\tsentence2\tscore", "a\tb\t1", "a\tc\t0.5"],
     "evaluate.geometry.positives_above is 4, and no pair of 'x' has a higher gold score"),
    (RankingTest, ["sentence1\tsentence2\tscore", "a\tb\t1", "a\tc\t2"], "nothing to rank"),
    (RankingTest, ["sentence1\tsentence2\tscore", *[f"a\t{i}\t3" for i in range(9)]],
     "all pairs have the score 3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "lines", "message"), BAD)
def test_bad_tables(tmp_path, kind, lines, message):
    with pytest.raises(UserError, match=message):
        kind(name="x", path=write(tmp_path / "x.tsv", lines)).check()


def test_labels_of_json_and_a_split_that_is_not_there(tmp_path):
    rows = [{"query": "q", "candidate": c, "label": x} for c, x in (("a", True), ("b", 0.0))]
    file = write(tmp_path / "x.jsonl", [json.dumps(row) for row in rows])
    (found,) = RerankingTest(name="x", path=file).load()
    assert found.relevant.tolist() == [True, False]
    with pytest.raises(UserError, match="no rows with split 'dev'; there are: None"):
        RerankingTest(name="x", path=file, split="dev").load()
    rows = [{"text": "a", "label": 1, "split": "train"}, {"text": "b", "label": 0}]
    file = write(tmp_path / "z.jsonl", [json.dumps(row) for row in rows])
    with pytest.raises(UserError, match="row 2: 'split' is empty"):
        ClusteringTest(name="x", path=file).load()
    rows = [{"text": "a", "label": float("nan")}]
    file = write(tmp_path / "nan.jsonl", [json.dumps(row) for row in rows])
    with pytest.raises(UserError, match="row 1: 'label' is empty"):
        ClusteringTest(name="x", path=file).load()
    # else the first row of one long cell
    file = write(tmp_path / "q.csv", ["text,label", '"An open quote,1', *["A text.,1"] * 9])
    with pytest.raises(UserError, match=r"read \(line 11: unexpected end.*quotation mark"):
        ClusteringTest(name="x", path=file).load()
    file = write(tmp_path / "UPPER.CSV", ["text,label", "a,1", "b,1", "c,2"])
    assert ClusteringTest(name="x", path=file).load().texts
    (tmp_path / "x.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match="cannot be read"):
        ClusteringTest(name="x", path=str(tmp_path / "x.parquet")).load()
    file = write(tmp_path / "y.jsonl", ['"a"'])
    with pytest.raises(UserError, match="every line must be a JSON object"):
        ClusteringTest(name="x", path=file).load()


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("documents", ["id\ttext", "d1\ta", "d1\tb"], "row 2: the id 'd1' is there twice"),
        ("relevance", ["query\tdocument\tlabel", "q1\td1\t1", "q1\td1\t0"], "is there twice; keep"),
        ("queries", ["id\ttext", "\ta"], "row 1: the id is empty"),
        ("queries", ["id\ttext", "q1\t "], "row 1: the text of 'q1' is empty"),
        ("queries", ["id\tquestion", "q1\ta"], "no column 'text'; it has id, question"),
        ("relevance", ["query\tdocument\tlabel", "q1\td7\t1"], "row 1: there is no document 'd7'"),
        ("relevance", ["query\tdocument\tlabel", "q7\td1\t1"], "row 1: there is no query 'q7'"),
        ("relevance", ["query\tdocument\tlabel", "q1\td1\tyes"], "'yes', which is not a number"),
        ("relevance", ["query\tdocument\tlabel", "q1\td1\t0"], "no document is relevant to any"),
        ("relevance", None, "relevance: there is no"),
    ],
)  # fmt: skip
def test_bad_corpora(tmp_path, file, lines, message):
    good = {
        "queries": ["id\ttext", "q1\ta"],
        "documents": ["id\ttext", "d1\ta"],
        "relevance": ["query\tdocument\tlabel", "q1\td1\t1"],
    }
    paths = {name: str(tmp_path / f"{name}.tsv") for name in good}
    for name, text in (good | {file: lines}).items():
        if text is not None:
            write(tmp_path / f"{name}.tsv", text)
    with pytest.raises(UserError, match=message):
        CorpusTest(name="x", **paths).check()


def test_a_corpus_is_read_once_to_be_checked_and_again_where_it_has_changed(tmp_path, monkeypatch):
    """A table asks for it in each of its rows."""
    names = ("queries", "documents", "relevance")
    paths = {name: str(tmp_path / f"{name}.tsv") for name in names}
    for name, row in zip(names, ("q1\ta", "d1\ta", "q1\td1\t1"), strict=True):
        head = "query\tdocument\tlabel" if name == "relevance" else "id\ttext"
        write(tmp_path / f"{name}.tsv", [head, row])
    loads, load = [], CorpusTest.load
    monkeypatch.setattr(CorpusTest, "load", lambda self: loads.append(1) or load(self))
    for _ in range(3):
        CorpusTest(name="read once", **paths).check()
    assert len(loads) == 1
    write(tmp_path / "documents.tsv", ["id\ttext", "d2\ta"])
    with pytest.raises(UserError, match="there is no document 'd1'"):
        CorpusTest(name="read once", **paths).check()


def test_figures_that_would_share_a_column_are_told_apart(tmp_path):
    table = {"name": "MR", "path": str(tmp_path / "x.tsv")}
    with pytest.raises(ValueError, match="'MR'"):
        EvaluateSettings(transfer=[table], classification=[table])
    with pytest.raises(ValueError, match="'MRR@10 MR'"):
        EvaluateSettings(
            reranking=[table],
            corpora=[{"name": "MR", "queries": "/q", "documents": "/d", "relevance": "/r"}],
        )
    with pytest.raises(ValueError, match="'transfer'"):  # the heading of their mean
        EvaluateSettings(transfer=[table | {"name": "transfer"}])
    EvaluateSettings(transfer=[table], clustering=[table], pairs=[table])  # AP MR, V MR


class _Work:
    def say(self, line, important=False):
        pass
