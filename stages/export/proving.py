"""Makes the files of a variant, and measures them beside the float32 student."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contract import Figure, Work
from stages.errors import UserError, lacks_room
from stages.evaluate.base import Encode, Evaluation, Tested
from stages.evaluate.speed import NUM_TEXTS, time_all, times_as_fast
from stages.export.convert import FILES
from stages.export.proof import Proof, cosines, points_lost
from stages.kinds import Kind

if TYPE_CHECKING:
    import numpy as np


class Unmade(Exception):
    """A variant cannot be made of this student, or does not run; its cause is the library's own
    error."""


@contextmanager
def _unmade() -> Iterator[None]:
    try:
        yield
    except (UserError, OSError):
        raise  # of settings or a disk
    except Exception as error:
        reason = error.__cause__ or error  # torch's exporter says there what it stumbled on
        if lacks_room(error) or lacks_room(reason):
            raise
        first = (str(reason).strip().splitlines() or [""])[0]
        raise Unmade(f"{type(reason).__name__}: {first}") from error


@dataclass
class Reference:
    """The float32 student, and what all its variants are compared with; made when first asked for.

    folder: the exported student. work: of the first variant; all of them read the same.
    compared, calibration: sentences of the corpus, no one in both; `kinds` are those of the former,
        the latter have their prompts already.
    """

    folder: Path
    compared: list[str]
    calibration: list[str]
    tests: tuple[Evaluation, ...]
    work: Work
    kinds: list[Kind] | None = None
    trust_remote_code: bool = False
    temporary: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    @property
    def local(self) -> Path:
        """For files that several variants are made of."""
        return Path(self.temporary.name)

    @cached_property
    def student(self) -> Any:
        from stages.export.running import load_folder

        return load_folder(self.folder, self.trust_remote_code)

    @cached_property
    def encode(self) -> Encode:
        from stages.export.running import encode_with

        return encode_with(self.student)

    @cached_property
    def vectors(self) -> "np.ndarray":
        return self.encode(self.compared, self.kinds)

    @cached_property
    def onnx(self) -> Path:
        from stages.export.convert import write_onnx

        write_onnx(self.student, file := self.local / FILES["onnx"])
        return file

    @cached_property
    def openvino(self) -> Path:
        from stages.export.convert import write_openvino

        write_openvino(self.onnx, file := self.local / FILES["openvino"])
        return file

    @cached_property
    def figures(self) -> list[Figure]:
        return self.score(self.student, self.work)

    def score(self, student: Any, work: Work) -> list[Figure]:
        """What the recipe's tests say of the student or a variant."""
        from stages.export.running import encode_with, rows_with, without_normalize

        pooled = rows_with(without_normalize(student))
        tested = Tested(encode_with(student), None, pooled=pooled)
        return [figure for test in self.tests for figure in test.score(tested, work).figures]


def write_variant(variant: str, reference: Reference, target: Path) -> None:
    """Writes the variant's files into the student's folder `target`.

    Raises:
        Unmade: there can be none.
    """
    from stages.export import convert

    file, student = target / FILES[variant], reference.student
    with _unmade():
        if variant == "bf16":
            convert.write_bfloat16(reference.folder / "model.safetensors", file)
        elif variant == "onnx-int8":
            convert.quantise_onnx(reference.onnx, file)
        elif variant == "openvino-int8":
            convert.quantise_openvino(reference.openvino, file, student, reference.calibration)
        else:
            made = reference.onnx if variant == "onnx" else reference.openvino
            file.parent.mkdir(parents=True, exist_ok=True)
            for one in made.parent.glob(f"{made.stem}.*"):
                shutil.copy(one, file.parent)


def prove(variant: str, reference: Reference, target: Path, work: Work) -> Proof:
    """Measures the variant whose files are in `target`.

    Raises:
        Unmade: it cannot be loaded, or does not run.
    """
    import numpy as np
    import torch

    from stages.export.running import encode_with, load_variant

    with tempfile.TemporaryDirectory() as whole:
        _link(reference.folder, Path(whole))
        _link(target, Path(whole))
        vectors = reference.vectors
        with _unmade():
            student = load_variant(Path(whole), variant, reference.trust_remote_code)
            encode = encode_with(student)
            found = encode(reference.compared, reference.kinds)
        mean, lowest = cosines(found, vectors)
        is_finite = mean == mean
        figures = reference.score(student, work) if is_finite else []
        texts = reference.compared[:NUM_TEXTS]
        kinds = reference.kinds and reference.kinds[:NUM_TEXTS]
        both = {"float32": reference.encode, "variant": encode}
        timed = {name: partial(one, kinds=kinds) for name, one in both.items()}
        seconds = time_all(timed, texts)
    ratio = times_as_fast(seconds["float32"], seconds["variant"])
    num_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return Proof(
        cosine=mean,
        lowest_cosine=lowest,
        num_compared=len(reference.compared),
        figures=figures,
        lost=points_lost(reference.figures, figures) if is_finite else {},
        times_as_fast=ratio,
        sentences_per_second=len(texts) / float(np.median(seconds["variant"])),
        threads=torch.get_num_threads(),
        megabytes=num_bytes / 1e6,
    )


def _link(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_symlink, dirs_exist_ok=True)


def _symlink(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).absolute())
