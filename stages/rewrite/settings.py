"""Settings of `perturb`: one source of rewrites and its filters. Imports neither torch nor Ray.

A recipe may name several. Training draws one rewrite of a sentence from all of them.
"""

from pydantic import Field, model_validator

from stages.fields import Slug
from stages.rewrite.back_translation import BackTranslation
from stages.rewrite.base import RewriteSource
from stages.rewrite.filters import Filters
from stages.rewrite.pairs import Pairs
from stages.rewrite.rewriting import Rewriting
from stages.settings import Extensible


class PerturbSettings(Extensible):
    """An entry of `perturb`. A new source is a file (settings and nodes) and a line here."""

    additions = "rewrites"

    name: Slug = Field(description="Name of the rewrites in node and artifact names.")
    pairs: Pairs | None = None
    backtranslation: BackTranslation | None = None
    rewriting: Rewriting | None = None
    filters: Filters = Filters()

    @model_validator(mode="after")
    def _one_source(self) -> "PerturbSettings":
        if len(self._sources) != 1:
            own = [name for name in type(self).model_fields if name not in ("name", "filters")]
            raise ValueError(f"name exactly one of: {', '.join([*own, *self.added_sections])}")
        return self

    @property
    def _sources(self) -> list[RewriteSource]:
        return [given for _, given in self if isinstance(given, RewriteSource)]

    @property
    def source(self) -> RewriteSource:
        """The one that is named."""
        return self._sources[0]

    @property
    def gives_negatives(self) -> bool:
        """Whether its rewrites may come with hard negatives."""
        return self.source.gives_negatives
