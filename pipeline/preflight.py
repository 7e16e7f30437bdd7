"""Looks at models and test sets before hours of work depend on them. Imports neither torch nor Ray.

What can only be seen while working (a broken line in a corpus) is found there.
"""

import json
from pathlib import Path
from typing import Any

from pipeline.graph import student_recipe
from pipeline.recipe import Recipe
from stages.encoder.settings import (
    EncoderSettings,
    ModelSettings,
    check_config,
    model_folder,
    resolved,
)
from stages.errors import UserError
from stages.evaluate.sts import load_sts


def check_inputs(recipe: Recipe, evaluated: bool = True) -> None:
    """Checks every model's configuration, and every STS set that is a file.

    Args:
        evaluated: False where only the student of the recipe is made.

    Raises:
        UserError: what is wrong, where, and how to mend it.
    """
    for settings in [*recipe.teachers, recipe.student]:
        config = _config(settings, recipe.storage)
        check_config(settings, config)
        if evaluated:
            tested = {"max_length": recipe.evaluate.max_length}
            check_config(settings.encoder().model_copy(update=tested), config)
    if detector := recipe.train.objectives.replaced_token:
        _config(detector.generator, recipe.storage)
    dev = [recipe.train.dev.sts] if recipe.train.dev else []
    geometry = [recipe.evaluate.geometry] if recipe.evaluate.geometry else []
    for test_set in [*dev, *((*recipe.evaluate.sts, *geometry) if evaluated else ())]:
        if test_set.path is not None:
            load_sts(test_set)


def _config(settings: ModelSettings, storage: str) -> dict[str, Any]:
    """A model's config.json; of another recipe's student, the one it will have."""
    if settings.recipe_file is None:
        return dict(json.loads(_config_file(settings).read_text()))
    recipe = student_recipe(settings.recipe_file, storage)
    check_inputs(recipe, evaluated=False)
    config = _config(recipe.student, storage)
    layers = recipe.student.layers
    return config | ({"num_hidden_layers": len(layers)} if layers else {})


def _config_file(settings: ModelSettings) -> Path:
    folder = model_folder(settings.model)
    if folder is not None:
        if isinstance(settings, EncoderSettings):
            resolved(settings, folder)
        return folder / "config.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(settings.model, "config.json", revision=settings.revision))
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        raise UserError(
            f"model '{settings.model}': not in the Hugging Face cache and not to be had from the "
            f"hub ({type(error).__name__}). Check the name and the network; offline, use a cached "
            "model, a local folder or package:NAME."
        ) from None
