"""Looks at models and test sets before hours of work depend on them. Imports neither torch nor Ray.

What can only be seen while working (a broken line in a corpus) is found there.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.graph import Node, student_recipe
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
from stages.packages import need
from stages.perturb.filters import check_filter_packages
from stages.perturb.pairs import pair_table
from stages.perturb.settings import (
    PerturbSettings,
    check_translation_folder,
    check_translation_packages,
)
from stages.sources import read_table


def check_inputs(recipe: Recipe, wanted: list[Node], evaluated: bool = True) -> None:
    """Checks every model's configuration, and every STS set that is a file.

    Args:
        wanted: what will be made; sources of rewrites that are there need no key, file or engine.
        evaluated: False where only the student of the recipe is made.

    Raises:
        UserError: what is wrong, where, and how to mend it.
    """
    for settings in [*recipe.teachers, recipe.student]:
        config = _config(settings, recipe.storage, wanted)
        check_config(settings, config)
        if evaluated:
            tested = {"max_length": recipe.evaluate.max_length}
            check_config(settings.encoder().model_copy(update=tested), config)
    if detector := recipe.train.objectives.replaced_token:
        _config(detector.generator, recipe.storage, wanted)
    _check_packages(recipe, wanted, evaluated)
    open_sources = {
        node.name.rpartition("/")[2].partition(":")[2]
        for node in wanted
        if node.kind in ("perturb", "translate") and node.recipe.name == recipe.name
    }
    for number, source in enumerate(recipe.perturb):
        if source.name in open_sources:
            _check_rewrites(source, f"perturb[{number}]", recipe.storage)
    dev = recipe.train.dev.sts if recipe.train.dev else []
    geometry = [recipe.evaluate.geometry] if recipe.evaluate.geometry else []
    for test_set in [*dev, *((*recipe.evaluate.sts, *geometry) if evaluated else ())]:
        if test_set.path is not None:
            load_sts(test_set)


def _check_packages(recipe: Recipe, wanted: list[Node], evaluated: bool) -> None:
    """Extras that the recipe needs for what will be made."""
    kinds = {node.kind for node in wanted if node.recipe.name == recipe.name}
    if "train" in kinds and recipe.train.resolved_engine == "deepspeed":
        need("deepspeed", "train.engine: deepspeed (also chosen by train.num_workers over 1)")
    if "sentences" in kinds and recipe.sentences.dataset is not None:
        need("hub", "sentences.dataset")
    sets = recipe.train.dev.sts if recipe.train.dev and "train" in kinds else []
    if evaluated and "evaluate" in kinds:
        geometry = [recipe.evaluate.geometry] if recipe.evaluate.geometry else []
        sets = [*sets, *recipe.evaluate.sts, *geometry]
    for test_set in sets:
        if test_set.dataset is not None:
            need("hub", f"STS set '{test_set.name}'")


def _check_rewrites(source: PerturbSettings, where: str, storage: str) -> None:
    check_filter_packages(source.filters, f"{where}.filters")
    if source.pairs is not None:
        next(read_table(pair_table(source.pairs, f"{where}.pairs")), None)
    if source.rewriting is not None:
        from stages.perturb.endpoint import read_key, read_variables

        read_variables(source.rewriting)
        if source.rewriting.engine == "endpoint":
            need("rewrites", f"{where}.rewriting", "aiohttp")
            read_key(source.rewriting)
        elif find_spec("vllm") is None:
            raise UserError(
                f"{where}.rewriting.engine vllm needs vLLM on this machine and the cluster's: "
                "pip install 'ray[llm]'"
            )
    if source.backtranslation is not None:
        for key in ("to_pivot", "from_pivot"):
            model = getattr(source.backtranslation, key)
            config = _config(model, storage, [])
            folder = model_folder(model.model)
            kind = config.get("model_type", "")
            check_translation_folder(model.model, folder, kind)
            check_translation_packages(model.model, source.backtranslation.engine, kind)
            if not config.get("is_encoder_decoder"):
                raise UserError(
                    f"{where}.backtranslation.{key}: model '{model.model}' does not translate (it "
                    "is not sequence-to-sequence); use one such as Helsinki-NLP/opus-mt-en-zh"
                )


def _config(settings: ModelSettings, storage: str, wanted: list[Node]) -> dict[str, Any]:
    """A model's config.json; of another recipe's student, the one it will have."""
    if settings.recipe_file is None:
        return dict(json.loads(_config_file(settings).read_text()))
    recipe = student_recipe(settings.recipe_file, storage)
    check_inputs(recipe, wanted, evaluated=False)
    config = _config(recipe.student, storage, wanted)
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
