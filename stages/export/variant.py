"""Variants of the exported student: made, measured against it, and kept if they pass the gate."""

import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.contract import (
    Artifact,
    EncoderLabel,
    Fingerprinted,
    Measurement,
    Resources,
    Stage,
    StudentPart,
    Work,
    measured,
)
from stages.encoder.config import default_prompt
from stages.encoder.prompts import own_prompts
from stages.encoder.settings import EncoderSettings
from stages.evaluate.base import Evaluation
from stages.evaluate.stage import tests_of
from stages.export.convert import FILES
from stages.export.proof import refusal
from stages.export.proving import Reference, Unmade, prove, write_variant
from stages.export.settings import GateSettings
from stages.kinds import kind_of_each
from stages.packages import need
from stages.planning import Graph
from stages.sentences.texts import texts_of_rows

NUM_COMPARED = 1000  # sentences whose vectors are compared
NUM_CALIBRATION = 300  # as sentence-transformers takes
NOTE = (
    "Variants: cosine to the float32 student, mean and lowest; x as fast: median of paired ratios "
    "to it, both in sentence-transformers on a CPU."
)
NEEDS = {
    "onnx": ("onnx", ("onnx", "onnxscript", "onnxruntime")),
    "onnx-int8": ("onnx", ("onnx", "onnxscript", "onnxruntime")),
    "openvino": ("openvino", ("onnx", "onnxscript", "openvino")),
    "openvino-int8": ("openvino", ("onnx", "onnxscript", "openvino", "nncf")),
}


@dataclass(frozen=True)
class Variant(Stage):
    """A variant's files (`model/`, to be laid over the export's), if it passes the gate; its
    figures in any case."""

    variant: str
    gate: GateSettings
    tests: tuple[Evaluation, ...]
    trust_remote_code: bool

    kind = "variant"
    wanted = True
    # 2: transfer tasks see vectors as they are pooled
    version = 2

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = {"export.variant": self.variant}
        found |= {f"export.gate.{key}": value for key, value in self.gate.identity().items()}
        return found | {f"evaluate.{test.title}": test.described() for test in self.tests}

    @property
    def packages(self) -> tuple[str, ...]:
        _, modules = NEEDS.get(self.variant, ("", ()))
        return (
            "sentence-transformers",
            *modules,
            *(p for test in self.tests for p in test.packages),
        )

    def resources(self) -> Resources:
        return Resources(alone=True)

    @property
    def shares(self) -> str:
        return "variants"

    def check(self) -> None:
        if self.variant in NEEDS:
            extra, modules = NEEDS[self.variant]
            need(extra, f"export.variants: {self.variant}", *modules)
        for test in self.tests:
            test.check()

    def load(self, work: Work) -> Reference:
        sentences = work.input("sentences")
        most = range(min(sentences.num_rows, NUM_CALIBRATION + NUM_COMPARED))
        texts, kinds = texts_of_rows(sentences, most)
        count = min(NUM_CALIBRATION, len(texts) // 2)
        folder = work.input("export").folder_path("model")
        default = default_prompt(EncoderSettings(model=str(folder))) or ""
        prompts = own_prompts(folder)
        calibration = [
            (prompts.get(kind, "") if kind else default) + text
            for text, kind in zip(texts[:count], kind_of_each(kinds, len(texts)), strict=False)
        ]
        compared = texts[count:][:NUM_COMPARED]
        of_these = kinds and kinds[count:][:NUM_COMPARED]
        return Reference(
            folder, compared, calibration, self.tests, work, of_these, self.trust_remote_code
        )

    def make(self, work: Work, loaded: Reference) -> None:
        work.say(f"making {self.variant}, and comparing it with the float32 student")
        with tempfile.TemporaryDirectory() as local:
            target = Path(local) / "model"
            try:
                write_variant(self.variant, loaded, target)
                proof = prove(self.variant, loaded, target, work)
            except Unmade as error:
                line = f"{self.variant} is not published: it cannot be made of this model ({error})"
                work.say(f"{line}. The run's log has the whole error.", important=True)
                work.say(traceback.format_exc())  # right behind the line: for the log alone
                work.publish(measured([], [f"{line}."], refused=f"{line}."))
                return
            missed = refusal(self.gate, proof)
            refused = f"{self.variant} is not published: {missed}. It has {proof.told()}."
            line = refused if missed else f"{self.variant}: {proof.told()}."
            work.say(line, important=True)
            label = EncoderLabel("after", "after", variant=self.variant)
            about = {"proof": asdict(proof), "refused": refused if missed else ""}
            stats = measured([Measurement(label, proof.row())], [NOTE, line], **about)
            work.publish(stats, None if missed else Path(local))

    def student_part(self, artifact: Artifact) -> StudentPart:
        usage = _usage(self.variant, self.trust_remote_code)
        return StudentPart(self.variant, usage, artifact.stats["refused"])


def _usage(variant: str, trust_remote_code: bool) -> str:
    file = FILES[variant]
    if variant == "bf16":
        options = 'model_kwargs={"variant": "bf16", "dtype": "bfloat16"}'
    else:
        backend = variant.removesuffix("-int8")
        options = f'backend="{backend}", model_kwargs={{"file_name": "{file}"}}'
    if trust_remote_code:
        options += ", trust_remote_code=True"
    return f'SentenceTransformer("path/to/this/folder", {options})'


def plan(graph: Graph) -> None:
    recipe = graph.recipe
    if recipe.export is None:
        return
    tests = tuple(test for test in tests_of(graph) if not test.reads_model)
    reads = dict.fromkeys(node for test in tests for node in test.reads)
    inputs = list(dict.fromkeys(["export", "sentences", *reads]))
    for name in recipe.export.variants:
        stage = Variant(name, recipe.export.gate, tests, recipe.student.trust_remote_code)
        graph.add(f"export:{name}", stage, inputs, f"{recipe.name}-{name}")
