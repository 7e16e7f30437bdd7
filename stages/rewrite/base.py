"""What a source of rewrites is. One source, one file, one line in `PerturbSettings` (or a plug-in).

Imports nothing heavy.
"""

from typing import TYPE_CHECKING

from stages.settings import Settings

if TYPE_CHECKING:
    from stages.planning import Graph
    from stages.rewrite.settings import PerturbSettings


class RewriteSource(Settings):
    """Settings of one source of rewrites; `plan` adds the nodes that it takes."""

    @property
    def gives_negatives(self) -> bool:
        """Whether its rewrites may come with hard negatives."""
        return False

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        """Adds `perturb:NAME`, a `Rewrites` stage, and what it reads.

        Args:
            whole: the entry of the recipe's `perturb` list that names this source.
            where: the place of that entry, e.g. `perturb[0]`.
        """
        raise NotImplementedError
