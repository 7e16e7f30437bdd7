"""Agreement with the teachers on sentences that were not trained on: figures without any label.

Student and teachers are compared by the similarities that they give pairs of these sentences.
Shapes: N held-out sentences; similarities (N, N), symmetric, whose diagonal does not count.
Memory: up to 64 bytes for each of the N^2, with 4,000 sentences 1 GiB.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from stages.contract import Work
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.examples import disagreements, neighbours
from stages.evaluate.relevance import mean_figures, mean_items, ndcg
from stages.evaluate.resampling import pseudo_values_of_pairs
from stages.evaluate.sts import spearman
from stages.evaluate.tables import finite_vectors
from stages.rows import FactorRows
from stages.sentences.settings import num_held_out
from stages.settings import execution
from stages.train.objectives.scores import mix_teachers

if TYPE_CHECKING:
    from stages.planning import Graph

NEIGHBOURS = 10
# Shares of all pairs, from the teachers' nearest on. Shares and not similarities, as the pairs of
# some teachers all have a cosine above 0.7.
NEAREST = "nearest 1%"
BANDS = {NEAREST: (0.0, 0.01), "next 9%": (0.01, 0.1), "other 90%": (0.1, 1.0)}


class AgreementTest(Evaluation):
    """Order of similarities and neighbours kept, against the teachers' mixed similarities."""

    of_teachers: ClassVar[bool] = False
    packages = ("scipy",)

    holdout: int | None
    weights: list[float]
    factors: dict[str, str] = execution(description="Inputs with factors, by teacher.")
    rows_per_shard: int = execution(description="Of the factors.")

    @property
    def title(self) -> str:
        return "agreement"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("sentences", *self.factors.values())

    def score(self, tested: Tested, work: Work) -> Result:
        from stages.sentences.texts import texts_of_rows

        sentences = work.input("sentences")
        rows = np.arange(num_held_out(self.holdout, sentences.num_rows))
        if not len(rows):
            note = f"No agreement: none of {sentences.num_rows:,} sentences is held out."
            return Result([], (note,))
        work.say(f"agreement: {len(rows):,} held-out sentences")
        texts, kinds = texts_of_rows(sentences, rows.tolist())
        vectors = finite_vectors(texts, tested.encode, kinds)
        factors = {}
        for name, node in self.factors.items():
            shards = work.input(node).shard_paths("factors.npy")
            factors[name] = FactorRows(shards, self.rows_per_shard).take(rows)
        result = score_agreement(vectors, factors, self.weights)
        student = vectors @ vectors.T
        teacher = teachers_similarities(list(factors.values()), self.weights)
        facts = {
            "neighbours": neighbours(texts, student, teacher),
            "disagreements": disagreements(texts, student, teacher, BANDS[NEAREST][1]),
        }
        return replace(result, facts={**result.facts, **facts})


def agreement_tests(graph: "Graph") -> list[Evaluation]:
    """The test of a recipe that holds sentences out."""
    recipe = graph.recipe
    if recipe.holdout == 0:
        return []
    return [
        AgreementTest(
            holdout=recipe.holdout,
            weights=[teacher.weight for teacher in recipe.teachers],
            factors={teacher.name: graph.factors[teacher.name] for teacher in recipe.teachers},
            rows_per_shard=recipe.sentences.rows_per_shard,
        )
    ]


def teachers_similarities(factors: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """(N, N) float32 of factors (N, D), mixed as in RankCSE Eq. 6."""
    import torch

    mixed = mix_teachers([torch.from_numpy(one) for one in factors], weights)
    return np.asarray(mixed.numpy())


def score_agreement(
    vectors_ND: np.ndarray, factors: dict[str, np.ndarray], weights: list[float]
) -> Result:
    """All figures x 100, with 95% intervals over sentences.

    Args:
        factors: (N, D) of each teacher, by name.
    """
    student_NN = vectors_ND @ vectors_ND.T
    teacher_NN = teachers_similarities(list(factors.values()), weights)
    bands = band_spearmans(student_NN, teacher_NN)
    parts = dict(bands)
    for name, one in factors.items() if len(factors) > 1 else ():
        parts[name] = 100 * pair_spearman(student_NN, teachers_similarities([one], [1.0]))
    near = pairs_of_bands(of_pairs(teacher_NN))[NEAREST].copy()  # without the order of all
    values = {
        "agreement": by_sentence(student_NN, teacher_NN).tolist(),
        "near pairs": by_sentence(student_NN, teacher_NN, near).tolist(),
    }
    over_all, over_near = mean_figures("", values)
    figures = [replace(over_all, parts=parts), over_near]
    rows = row_measures(student_NN, teacher_NN, NEIGHBOURS)
    figures += mean_figures("", rows)
    num_pairs = len(vectors_ND) * (len(vectors_ND) - 1) // 2
    notes = (
        f"Agreement with the teachers, x 100, on {len(vectors_ND):,} sentences kept from training: "
        f"Spearman over all {num_pairs:,} pairs.",
        "Near pairs: over the nearest 1% of them. Kendall, NDCG@10, nearest 10: each sentence's "
        "order of all others.",
    )
    facts = {"num_sentences": len(vectors_ND)}
    return Result(figures, notes, facts, mean_items("", values | rows))


def of_pairs(matrix_NN: np.ndarray) -> np.ndarray:
    """Its entries i < j, (N (N - 1) / 2,)."""
    return matrix_NN[np.triu_indices(len(matrix_NN), 1)]


def pair_spearman(student_NN: np.ndarray, teacher_NN: np.ndarray) -> float:
    """Spearman's rho over the pairs i < j; nan where either side's are all alike."""
    return spearman(of_pairs(student_NN), of_pairs(teacher_NN))


def band_spearmans(student_NN: np.ndarray, teacher_NN: np.ndarray) -> dict[str, float]:
    """Spearman x 100 within BANDS of the teachers' similarity."""
    student, teacher = of_pairs(student_NN), of_pairs(teacher_NN)
    return {
        name: 100 * spearman(student[pairs], teacher[pairs])
        for name, pairs in pairs_of_bands(teacher).items()
    }


def pairs_of_bands(teacher_P: np.ndarray) -> dict[str, np.ndarray]:
    """Which of P pairs are in each band of the teachers' similarities (P,)."""
    order = np.argsort(-teacher_P, kind="stable")
    return {
        name: order[round(first * len(order)) : round(last * len(order))]
        for name, (first, last) in BANDS.items()
    }


def row_measures(
    student_NN: np.ndarray, teacher_NN: np.ndarray, neighbours: int
) -> dict[str, list[float]]:
    """How alike each sentence's ranking of all others is.

    Kendall's tau-b (0 where all are alike); NDCG of the first `neighbours` with the teachers'
    similarities as gains (those below 0 as 0; left out where no gain is above it); share of the
    teachers' nearest `neighbours` among the student's, of equal ones the first.
    """
    from scipy.stats import kendalltau

    found: dict[str, list[float]] = {"Kendall": [], f"NDCG@{neighbours}": []}
    overlaps: list[float] = []
    for row, (student, teacher) in enumerate(zip(student_NN, teacher_NN, strict=True)):
        own, taught = np.delete(student, row), np.delete(teacher, row)
        order, best = (np.argsort(-one, kind="stable") for one in (own, taught))
        gains = np.maximum(taught, 0)
        found["Kendall"].append(float(np.nan_to_num(kendalltau(own, taught).statistic)))
        if gains.any():
            found[f"NDCG@{neighbours}"].append(ndcg(gains[order], gains, neighbours))
        overlaps.append(
            len(np.intersect1d(order[:neighbours], best[:neighbours])) / min(neighbours, len(own))
        )
    return found | {f"nearest {neighbours}": overlaps}


def by_sentence(
    student_NN: np.ndarray, teacher_NN: np.ndarray, pairs_P: np.ndarray | None = None
) -> np.ndarray:
    """`pseudo_values_of_pairs` (N,) of `pair_spearman` over sentences; nan where it is nan.

    What pairs add to rho is known by the delta method, with the ranks that they have.

    Args:
        pairs_P: which of the pairs i < j count; None: all.
    """
    from scipy.stats import rankdata

    size = len(student_NN)
    first, second = np.triu_indices(size, 1)
    if pairs_P is not None:
        first, second = first[pairs_P], second[pairs_P]
    a, b = (rankdata(side[first, second]) for side in (student_NN, teacher_NN))
    a -= a.mean()
    b -= b.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        a /= np.sqrt(a @ a)
        b /= np.sqrt(b @ b)
        rho = a @ b
        influences_P = a * b - rho / 2 * (a * a + b * b)
        influences_N = np.bincount(first, influences_P, size) + np.bincount(
            second, influences_P, size
        )
    return pseudo_values_of_pairs(float(rho), influences_N, influences_P @ influences_P)
