"""What a finished run of a recipe has measured, as plain numbers."""

from pipeline.plan.plan import make_plan
from pipeline.report.figures import collect
from stages.recipe import Recipe


def figures_of(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Figures by encoder (its row's title in the table) and name; sizes and speed left out."""
    results = collect(make_plan(recipe))
    return {
        encoder.title: {
            name: figure.value
            for name, figure in results.figures(encoder).items()
            if name not in ("layers", "MB", "sentences/s")
        }
        for encoder in results.encoders
    }


def train_stats(recipe: Recipe) -> dict[str, float]:
    """What training says of its student, such as `dev_spearman` of the chosen checkpoint."""
    manifest = make_plan(recipe).nodes["train"].manifest
    assert manifest is not None, "the recipe has not been trained"
    return manifest.stats
