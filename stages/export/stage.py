"""The student as a folder that others load: sentence-transformers' format and a model card."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract import Artifact, Fingerprinted, Stage, StudentPart, Work
from stages.encoder.config import default_prompt
from stages.encoder.modules import read_pipeline
from stages.encoder.source import EncoderSource
from stages.export.card import model_card
from stages.export.licence import Origin, licences, origin
from stages.kinds import KINDS, Kind
from stages.planning import Graph


@dataclass(frozen=True)
class Export(Stage):
    """The trained student as `model/`; with its rank corpus, where it is used with ranks.

    name, summary: for the model card. It gets figures only when a run ends (`student_card`), so
    that another test does not export anew.
    origins: base model and teachers, whose licences the card states.
    aligned_to: the teacher in whose space the student stays. widths: that vectors may be cut to.
    """

    student: EncoderSource[Any]
    name: str
    summary: str
    corpus: str = ""
    rank_weight: float | None = None
    origins: tuple[Origin, ...] = ()
    aligned_to: str = ""
    widths: tuple[int, ...] = ()

    kind = "export"
    wanted = True
    # 4: padding that sentence-transformers masks as we do
    version = 4

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found: dict[str, Any] = {"max_length": self.student.settings.max_length}
        assert self.student.training is not None
        begun = self.student.training.student.settings
        if not self.student.has_kinds and (
            begun.prompt or begun.prompt_name or default_prompt(begun)
        ):
            found["prompts"] = ["default", *KINDS]  # the kinds' were once left out
        return found | ({"ranks.inference_weight": self.rank_weight} if self.corpus else {})

    def check(self) -> None:
        from stages.export.folder import check_tokenizer

        assert self.student.training is not None
        begun = self.student.training.student
        check_tokenizer(begun.settings, begun.config())

    def make(self, work: Work, loaded: Any) -> None:
        from stages.encoder.tokenizer import load_tokenizer
        from stages.export.folder import export_static, export_student

        settings = self.student.located(work)
        data = work.input("sentences").stats
        counts = {key: data[key] for key in ("kept", "read", "rejected")}
        stated = licences(self.origins)
        prompts = settings.prompts
        card = self._card(counts, stated, prompts)
        with tempfile.TemporaryDirectory() as local:
            target = Path(local) / "model"
            model = Path(settings.model)
            if read_pipeline(model).pooling:
                tokenizer = load_tokenizer(settings)
                export_student(model, tokenizer, settings.max_length, card, target)
            else:
                export_static(model, card, target)
            if self.corpus:
                corpus = work.input(self.corpus)
                for name in corpus.files:
                    shutil.copy(corpus.file_path(name), target / name)
                about = {"inference_weight": self.rank_weight}
                (target / "ranks.json").write_text(json.dumps(about) + "\n")
            more = {"prompts": prompts} if prompts else {}
            work.publish({"data": counts, "licences": stated, **more}, Path(local))

    def student_card(
        self, artifact: Artifact, table: str, parts: Sequence[StudentPart] = ()
    ) -> str | None:
        stats = artifact.stats
        stated = stats.get("licences", ())  # not of an export by an older version
        return self._card(stats["data"], stated, stats.get("prompts", {}), table, parts)

    def _card(
        self,
        data: dict[str, Any],
        stated: Sequence[Mapping[str, str]],
        prompts: Mapping[Kind, str],
        table: str = "",
        parts: Sequence[StudentPart] = (),
    ) -> str:
        return model_card(
            self.name,
            self.summary,
            data,
            bool(self.corpus),
            stated,
            table,
            parts,
            self.aligned_to,
            self.widths,
            prompts,
            self.student.settings.trust_remote_code,
        )


def plan(graph: Graph) -> None:
    recipe = graph.recipe
    corpus = "corpus:after" if "corpus:after" in graph else ""
    weight = recipe.ranks.inference_weight if recipe.ranks and corpus else None
    student = graph.trained_student()
    origins = [origin("base model", graph.student())]
    for teacher in recipe.teachers:
        what = f"teacher {teacher.name}"
        if teacher.model:
            origins.append(origin(what, graph.encoder(teacher.encoder())))
        else:
            asked = f"{teacher.endpoint.model} of an endpoint" if teacher.endpoint else ""
            origins.append(Origin(what, None, asked))
    aligned_to = recipe.teachers[0].name if recipe.student.aligned else ""
    stage = Export(
        student, recipe.name, recipe.summary(), corpus, weight, tuple(origins), aligned_to,
        tuple(student.cut_widths(recipe.student.dimensions)),
    )  # fmt: skip
    graph.add("export", stage, ["sentences", *student.inputs, *([corpus] if corpus else [])])
