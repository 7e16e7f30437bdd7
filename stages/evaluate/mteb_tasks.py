"""Any task of MTEB 2 by its name, through MTEB's own package.

The package brings the task's data (from the Hugging Face hub), its procedure and its main score.
It sees vectors as sentence-transformers returns them, and compares them by cosine; with the
encoder's own prompts of queries and documents, not MTEB's.

In MTEB's own cache an encoder's results are below `Tested.known_as`, whose revision is of all that
decides its vectors and of MTEB's version. Items are beside them: MTEB's results are scores alone.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from stages.contract import Figure, Work
from stages.errors import UserError
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.mteb_items import is_of, items_of
from stages.evaluate.resampling import Items, interval
from stages.fields import Name, StoragePath
from stages.kinds import Kind
from stages.packages import need
from stages.settings import Settings, execution


class MtebTask(Settings):
    """A task of MTEB, by name."""

    task: Name = Field(description="Name of the task, such as Banking77Classification.")
    languages: list[str] = Field(
        [], description="Only these languages (ISO 639-3, such as eng) of the task; none: all."
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"task": value} if isinstance(value, str) else value


class MtebTest(MtebTask, Evaluation):
    """The main score of a task of MTEB."""

    reads_returned = True

    cache: StoragePath | None = execution(None, description="`evaluate.mteb_cache`.")

    @property
    def title(self) -> str:
        return f"mteb-{self.task}"

    def described(self) -> dict[str, Any]:
        """With the package's version, which has the procedure and the data's revision."""
        there = find_spec("mteb") is not None  # else `check` says so
        return super().described() | {"mteb": metadata.version("mteb") if there else None}

    @property
    def has_kinds(self) -> bool:
        return True

    def check(self) -> None:
        need("mteb", f"evaluate.mteb '{self.task}'")
        self.load()
        if self.cache is not None:
            results = Path(self.cache, "results")  # where MTEB writes
            there = next(one for one in (results, *results.parents) if os.path.exists(one))
            if "://" in self.cache or not (there.is_dir() and os.access(there, os.W_OK)):
                raise UserError(
                    f"evaluate.mteb_cache '{self.cache}': MTEB cannot write there; name another "
                    "folder, or leave it out"
                )

    def load(self) -> Any:
        """The task, without its data.

        Raises:
            UserError: MTEB knows no such task, or not in these languages.
        """
        import mteb

        try:
            return mteb.get_task(self.task, languages=self.languages or None)
        except (KeyError, ValueError) as error:
            told = str(error.args[0] if error.args else error).removeprefix("KeyError: ")
            raise UserError(f"evaluate.mteb '{self.task}': MTEB says: {told}") from None

    def score(self, tested: Tested, work: Work) -> Result:
        import mteb

        task, model = self.load(), _Model(tested)
        work.say(f"{self.task}: MTEB {mteb.__version__}")
        cached = self.cache is not None and tested.known_as is not None
        known = self._known(model, work) if cached else None
        if known is None or known.get_missing_evaluations(task):
            found, items = self._evaluated(model, task)
            if cached:
                whole = known.merge(found) if known and known.is_mergeable(found) else found
                try:
                    mteb.ResultCache(self.cache).save_to_cache(whole, model.mteb_model_meta)
                    self._keep_items(model, items)
                except OSError as error:  # the figures are there; the artifact will have them
                    work.say(f"WARNING: not put into MTEB's cache: {error}", important=True)
        else:
            work.say(f"{self.task}: from MTEB's cache in {self.cache}")
            found, items = known, self._known_items(model)
        found = found.validate_and_filter_scores(task)  # a cache may have other languages too
        if items is not None and not is_of(items, found):  # they are of those
            items = None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{self.task}.json"
            found.to_disk(file)
            files = {file.name: file.read_bytes()}
        limits = _range_of_draws(found, task)
        if items is not None and limits is None:
            limits = interval(100 * items.resampled())
        figure = Figure(
            self.task, 100 * found.get_score(), interval=limits, percent=True, averaged="MTEB"
        )
        note = f"{self.task}: main score x 100 of MTEB {mteb.__version__} ({task.metadata.type})."
        kept = {} if items is None else {self.task: items}
        return Result([figure], (note,), items=kept, files=files)

    def _evaluated(self, model: "_Model", task: Any) -> tuple[Any, Items | None]:
        import mteb

        try:
            for one in task.metadata.tasks if task.is_aggregate else [task]:
                one.load_data()
        except (OSError, ValueError) as error:  # no network, no such data set, a private one
            raise UserError(
                f"evaluate.mteb '{self.task}': its data set "
                f"{one.metadata.dataset.get('path')} cannot be had ({str(error)[:300]})"
            ) from error
        with tempfile.TemporaryDirectory() as folder:
            (found,) = mteb.evaluate(
                model, task, cache=None, co2_tracker=False, show_progress_bar=False,
                prediction_folder=folder,
            ).task_results  # fmt: skip
            return found, items_of(task, found, Path(folder))

    def _known(self, model: "_Model", work: Work) -> Any:
        """What the cache has of the model, maybe of some of the task's languages only."""
        import mteb

        try:
            return mteb.ResultCache(self.cache).load_task_result(self.task, model.mteb_model_meta)
        except Exception as error:  # MTEB writes files in place, and stumbles in many ways
            work.say(
                f"WARNING: MTEB's cache in {self.cache} cannot be read ({type(error).__name__}: "
                f"{error}): a file is cut, or being written; {self.task} is run", important=True,
            )  # fmt: skip
            return None

    def _items_file(self, model: "_Model") -> Path:
        import mteb

        cache = mteb.ResultCache(self.cache)
        path = cache.get_task_result_path(self.task, model.mteb_model_meta)
        return path.with_suffix(".items")

    def _keep_items(self, model: "_Model", items: Items | None) -> None:
        if items is not None:
            told = {"statistic": items.statistic, "values": items.values.tolist()}
            self._items_file(model).write_text(json.dumps(told))

    def _known_items(self, model: "_Model") -> Items | None:
        """None where there are none, or they are cut: an interval less, and no mark."""
        try:
            told = json.loads(self._items_file(model).read_text())
            items = Items(told["statistic"], np.asarray(told["values"], float))
            items.figure()
            return items
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None


def _range_of_draws(found: Any, task: Any) -> tuple[float, float] | None:
    """Of the main score x 100: over the draws of a classification, over the runs of a clustering;
    None of other tasks, and of several splits, languages or levels."""
    scores = [one for of_split in found.scores.values() for one in of_split]
    name = task.metadata.main_score
    draws = [one[name] for one in scores[0].get("scores_per_experiment", ())]
    levels = scores[0].get(f"{name}s", {})
    if isinstance(levels, dict) and len(levels) == 1:
        (draws,) = levels.values()
    if len(scores) > 1 or not draws:
        return None
    return 100 * min(draws), 100 * max(draws)


class _Model:
    """The encoder as MTEB asks it."""

    def __init__(self, tested: Tested) -> None:
        from mteb.models import ModelMeta

        known = dict(zip(("name", "revision"), tested.known_as or (), strict=False))
        self.mteb_model_meta = ModelMeta.create_empty(known)
        self._tested = tested

    def encode(
        self, inputs: Iterable[dict[str, Any]], *, prompt_type: Any = None, **others: Any
    ) -> np.ndarray:
        texts = [text for batch in inputs for text in batch["text"]]
        kinds: dict[str, Kind] = {"query": "query", "document": "document"}
        kind = kinds.get(getattr(prompt_type, "value", prompt_type) or "")
        return self._tested.as_returned(texts, kind)

    def similarity(self, one: Any, other: Any) -> Any:
        from sentence_transformers.util import cos_sim

        return cos_sim(one, other)

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        from sentence_transformers.util import pairwise_cos_sim

        return pairwise_cos_sim(one, other)
