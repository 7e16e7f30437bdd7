"""Settings of `evaluate`: the list of tests. Imports no torch."""

from pydantic import Field, model_validator

from stages.encoder.settings import LONGEST
from stages.evaluate.base import Evaluation
from stages.evaluate.baselines import BaselineSettings
from stages.evaluate.classification import ClassificationTest
from stages.evaluate.clustering import ClusteringTest
from stages.evaluate.corpora import CorpusTest
from stages.evaluate.geometry import GeometrySettings
from stages.evaluate.mteb_tasks import MtebTask, MtebTest
from stages.evaluate.pairs import PairsTest
from stages.evaluate.ranking import RankingTest
from stages.evaluate.reranking import RerankingTest
from stages.evaluate.retrieval import RetrievalSettings
from stages.evaluate.sets import StsSettings, check_names_differ
from stages.evaluate.size import Size
from stages.evaluate.sts import StsTest
from stages.evaluate.transfer import TransferTest
from stages.fields import StoragePath
from stages.settings import Extensible, added, execution

# Columns of every table, which no test set may be called.
TAKEN_NAMES = (
    "layers", "MB", "mean", "sentences/s", "transfer", "classification", "clustering", "pairs",
    "KCC", "NDCG", "MTEB", "agreement", "near pairs", "Kendall", "NDCG@10", "nearest 10", "nDCG@10",
    "MRR@10", "R@1", "R@10", "alignment", "uniformity",
)  # fmt: skip


class EvaluateSettings(Extensible):
    """The list of tests. Tests of plug-ins join it."""

    additions = "evaluations"

    sts: list[StsSettings] = Field([], description="STS sets for the final table, a test each.")
    retrieval: RetrievalSettings | None = Field(
        None, description="Retrieval among held-out documentation; it needs no labels."
    )
    geometry: GeometrySettings | None = Field(
        None, description="STS set for alignment and uniformity, usually STS-B dev."
    )
    transfer: list[TransferTest] = added(
        [], description="Transfer tasks (SentEval): a linear classifier on frozen vectors."
    )
    ranking: list[RankingTest] = added(
        [], description="STS sets for KCC and NDCG (RankCSE): the order of a sentence's partners."
    )
    corpora: list[CorpusTest] = added(
        [], description="Retrieval: queries, documents and relevance from files."
    )
    reranking: list[RerankingTest] = added([], description="Candidates of queries.")
    classification: list[ClassificationTest] = added(
        [], description="Few-shot classification, as MTEB does it."
    )
    clustering: list[ClusteringTest] = added([], description="Sentences with labels to find again.")
    pairs: list[PairsTest] = added([], description="Pairs that mean the same or do not.")
    mteb: list[MtebTask] = added([], description="Tasks of MTEB, by name.")
    mteb_cache: StoragePath | None = execution(
        None,
        description="MTEB's folder of results, such as ~/.cache/mteb: those of the same encoder "
        "are taken from there, and others added.",
    )
    baselines: list[BaselineSettings] = added(
        [], description="Rows of encoders that teach nobody, and of averaged word vectors."
    )
    num_bootstrap: int = Field(
        1000, ge=0, description="Bootstrap resamples for the 95% intervals of STS sets; 0: none."
    )
    speed: bool = Field(
        True, description="Time the student side by side with its teachers, at the end."
    )
    max_length: int = Field(
        128,
        ge=3,
        le=LONGEST,
        description="Most tokens of a test sentence, the same for every encoder.",
    )
    processes: int = execution(
        1,
        ge=1,
        le=1000,
        description="Among which an encoder's tests are divided, each with the model in memory.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "EvaluateSettings":
        check_names_differ(self.sts)
        columns = [*self.sts, *self.transfer, *self.classification]  # called by the bare name
        titles = [test.title for test in self.tests if not isinstance(test, StsTest)]
        titles = [one.name for one in columns] + [one.task for one in self.mteb] + titles
        ranked = [one.name for one in self.reranking] + [one.name for one in self.corpora]
        titles += [f"MRR@10 {name}" for name in ranked]
        for title in (*titles, *TAKEN_NAMES):
            if titles.count(title) > (title not in TAKEN_NAMES):
                raise ValueError(f"the name '{title}' of a test is taken; choose another")
        return self

    @model_validator(mode="after")
    def _documents_to_rank(self) -> "EvaluateSettings":
        for baseline in self.baselines:
            if baseline.bm25 and not any(test.of_documents for test in self.tests):
                raise ValueError(
                    f"baseline '{baseline.name}': bm25 ranks documents, and there is no test under "
                    "`retrieval`, `corpora` or `reranking`"
                )
        return self

    @property
    def tests(self) -> list[Evaluation]:
        """All tests, in the order of the table's columns."""
        found: list[Evaluation] = [Size()]
        found += [StsTest(sts=one, num_bootstrap=self.num_bootstrap) for one in self.sts]
        found += [*self.transfer, *self.ranking, *self.corpora, *self.reranking]
        found += [*self.classification, *self.clustering, *self.pairs]
        found += [MtebTest(**dict(one), cache=self.mteb_cache) for one in self.mteb]
        found += [one for one in (self.retrieval, self.geometry) if one is not None]
        found += [one for one in self.added_sections.values() if isinstance(one, Evaluation)]
        return found
