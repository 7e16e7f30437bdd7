"""What a test of encoders is. One test, one file, its field and place in `EvaluateSettings`
(or a plug-in)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from stages.contract import Figure, Work
from stages.evaluate.resampling import Items
from stages.kinds import Kinds
from stages.plugins import plugin_of
from stages.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from stages.encoder.model import Encoder
    from stages.encoder.pipeline import PipelineEncoder
    from stages.evaluate.baselines import WordVectors
    from stages.evaluate.bm25 import Bm25


class Encode(Protocol):
    """Texts to vectors (N, D) float32 whose dot products are the similarities.

    Texts of a kind get its prompt; of none, what the encoder puts before every text.
    """

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> "np.ndarray": ...


@dataclass(frozen=True)
class Tested:
    """The encoder under test.

    encode: with rank vectors, where the node asks for them.
    pooled: vectors as they are pooled, of any length; None where there are those of `encode` only.
    returned: vectors as sentence-transformers returns them; None for those of `encode`.
    model: the bare encoder; None for a variant of an exported student, of which there are vectors
        only (see `Evaluation.reads_model`).
    encode_documents: the teacher's, where it is the one that embeds documents (or second sentences)
        in a space that it shares with the student; None for `encode` itself.
    known_as: its name and revision in MTEB's cache of results; None where it has none there.
    """

    encode: Encode
    model: "Encoder | PipelineEncoder | WordVectors | Bm25 | None"
    encode_documents: Encode | None = None
    pooled: Encode | None = None
    returned: Encode | None = None
    known_as: tuple[str, str] | None = None

    @property
    def as_pooled(self) -> Encode:
        """What SentEval's classifiers see; of models that sentence-transformers computes, what
        their modules return."""
        return self.pooled or self.encode

    @property
    def as_returned(self) -> Encode:
        """What MTEB's procedures see (`Evaluation.reads_returned`)."""
        return self.returned or self.encode


@dataclass(frozen=True)
class Result:
    """What a test measured.

    notes: what its figures mean, a line each, shown once below the table. facts: further data for
    whoever reads the manifest. items: what figures were computed from, by name, where two encoders
    are to be compared on it. files: to be kept with the figures, by name.
    """

    figures: list[Figure]
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    items: Mapping[str, Items] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Evaluation(Settings):
    """One test; its settings are its identity, so another test makes nothing else stale.

    two_sided: whether it compares texts with others, and so reads `Tested.encode_documents`.
    of_documents: whether it ranks documents for queries, and encodes the documents first.
    of_teachers: whether it says anything about a teacher.
    reads_returned: whether it reads `Tested.as_returned`.
    packages: see `Stage.packages`.
    """

    two_sided: ClassVar[bool] = False
    of_documents: ClassVar[bool] = False
    of_teachers: ClassVar[bool] = True
    reads_returned: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()

    @property
    def title(self) -> str:
        """Names the test in node and artifact names; different tests of a recipe differ in it."""
        raise NotImplementedError

    @property
    def reads(self) -> tuple[str, ...]:
        """Nodes that it reads beside the encoder, such as `sentences`."""
        return ()

    @property
    def has_kinds(self) -> bool:
        """Whether some of its texts are queries or documents, which have prompts of their own."""
        return self.of_documents

    @property
    def reads_model(self) -> bool:
        """Whether it looks at `Tested.model`; it is then no test for variants of the student."""
        return False

    def described(self) -> dict[str, Any]:
        """What decides its figures: class, settings and plug-in."""
        found = self.identity(f"evaluate.{self.title}") | plugin_of(type(self))
        return found | {"kind": type(self).__name__}

    def check(self) -> None:
        """Looks at its files before anything is made; no torch.

        Raises:
            UserError: what is wrong, where, and how to mend it.
        """

    def score(self, tested: Tested, work: Work) -> Result:
        """Runs the test. Figures that are no number are shown as such and never win anything."""
        raise NotImplementedError
