"""The contract between a stage and whoever runs it.

A stage is a room under `stages/`. It says what it computes (`identity`, `version`), what it takes
(`resources`), how it is made (`open` for shards, `make` for a whole), what is checked beforehand
and what a sample of it looks like. Everything it needs of a run it is handed as `Work`: opened
inputs, a place to write, a way to say how far it is. So a stage imports nothing above it, and
`pipeline/` has no list of stages.

A stage object holds typed settings only. It is small, and it travels to the process that works.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from stages.files import Root


@dataclass(frozen=True)
class Workers:
    """Training processes. None: what the cluster has, divided by their number.

    grouped: they run under Ray Train and find each other; else there is one, a plain task.
    """

    count: int = 1
    cpus: int | None = None
    gpus: int | None = None
    grouped: bool = False


@dataclass(frozen=True)
class Resources:
    """What one process of a node takes.

    gpu: whether it computes on a GPU where the cluster has one.
    workers: of nodes that train; the rest does not count then.
    in_driver: `make` runs Ray itself, so it is called in the driver.
    exclusive: nodes with the same word do not run side by side.
    alone: nothing runs beside it, since it measures time.
    secrets: environment variables that are read on the driver and handed to `Work.secret`.
    """

    cpus: float = 1
    gpu: bool = False
    workers: Workers | None = None
    in_driver: bool = False
    exclusive: str = ""
    alone: bool = False
    secrets: tuple[str, ...] = ()


NO_FIGURES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Shard:
    """One shard's files by name, ready to be stored, and its number of rows."""

    files: dict[str, bytes]
    num_rows: int


class Artifact(Protocol):
    """A published artifact. Every file is verified when it is first opened."""

    @property
    def stats(self) -> dict[str, Any]: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def shard_numbers(self) -> list[int]: ...
    @property
    def files(self) -> list[str]: ...
    def shard_rows(self, number: int) -> int: ...
    def shard_path(self, number: int, name: str) -> Path: ...
    def shard_paths(self, name: str) -> list[Path]: ...
    def file_path(self, name: str) -> Path: ...
    def folder_path(self, name: str) -> Path: ...


class Say(Protocol):
    """Tells how far a node is: the user `text`, the run's log and monitoring `figures` too.

    What is not important is shown now and then only.
    """

    def __call__(
        self, text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES
    ) -> None: ...


class Work(Protocol):
    """One node to be made, in whatever process that happens.

    name: the node's, for messages. scratch: folder under `root` for unfinished work, deleted when
    the artifact is published. attempt: eight hexadecimal digits; another process that makes the
    same artifact, and was thought dead, has others. owner: short name of the artifact, e.g. in a
    journal that others share. stopping: whether the run is to end, or to leave this machine: what
    can be kept is then put away, and `Stopped` raised. count_tokens: adds what a model was fed, so
    that the share of padding is known: tokens, and all positions of their batches. may_pay: whether
    what costs money may be done now; it raises what ends the work where it never may again.
    begin_again: forgets the finished shards.
    """

    @property
    def name(self) -> str: ...
    @property
    def root(self) -> Root: ...
    @property
    def scratch(self) -> str: ...
    @property
    def attempt(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def input_names(self) -> list[str]: ...
    def input(self, name: str) -> Artifact: ...
    def secret(self, variable: str) -> str: ...
    def say(
        self, text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES
    ) -> None: ...
    def count_tokens(self, tokens: int, positions: int) -> None: ...
    def stopping(self) -> bool: ...
    def may_pay(self) -> bool: ...
    def missing_shards(self) -> list[int]: ...
    def put_shard(self, number: int, shard: Shard) -> object: ...
    def read_shard_file(self, name: str) -> Iterator[bytes]: ...
    def publish(
        self,
        stats: dict[str, Any],
        folder: Path | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None: ...
    def begin_again(self) -> None: ...


class Fingerprinted(Protocol):
    """An input as far as an identity may depend on it."""

    @property
    def fingerprint(self) -> str: ...


class Stage(ABC):
    """What one node of a recipe computes.

    kind: names the artifacts' folder. version: bump it when the code changes what is computed.
    row_wise: the artifact has a shard for each shard of its first input, and is continued shard by
    shard.
    wanted: people want it, and not only stages that read it; what nobody wants is made only for
    those that lack it.
    reads_commits: models of the hub are read at the commits that the run has settled on
    (stages/encoder/hub.py); else whoever fetches them knows only their revisions.
    """

    kind: ClassVar[str]
    version: ClassVar[int]
    row_wise: ClassVar[bool] = False
    wanted: ClassVar[bool] = False
    reads_commits: ClassVar[bool] = True

    @abstractmethod
    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        """What changes the result, by setting path; devices, counts and places do not.

        Raises:
            UserError: a file, model folder or package that the settings name is not there.
        """

    def resources(self) -> Resources:
        """What a process of this node takes."""
        return Resources()

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose versions decide what it makes, beside those that all stages use."""
        return ()

    @property
    def measures(self) -> "EncoderLabel | None":
        """The one encoder that it measures, if it is a test of one."""
        return None

    @property
    def shares(self) -> str:
        """Nodes with the same word are made by one process, which calls `load` once; "" alone."""
        return ""

    def check(self) -> None:  # noqa: B027 - nothing to look at is the usual case
        """Looks at models and files before hours of work depend on them; no torch, no Ray.

        Raises:
            UserError: what is wrong, where, and how to mend it.
        """

    def check_rows(self, num_rows: int) -> None:  # noqa: B027 - as check
        """As `check`, once the sentences are counted."""

    def expected_rows(self, source: Artifact) -> dict[int, int]:
        """Rows that every shard of a row-wise stage must have, by number: those of the source's."""
        return {number: source.shard_rows(number) for number in source.shard_numbers}

    def unfinished(self, names: list[str]) -> str:
        """What files in the scratch folder say about an interrupted attempt; "" for nothing."""
        return ""

    def load(self, work: Work) -> Any:
        """What this node keeps in memory while it works, and those that share it."""
        return None

    def make(self, work: Work, loaded: Any) -> None:
        """Makes the whole node and publishes it."""
        raise NotImplementedError

    def student_card(
        self, artifact: Artifact, table: str, parts: Sequence["StudentPart"] = ()
    ) -> str | None:
        """The model card with a run's figures, where the artifact is a student to be used (its
        folder `model`); None for all others."""
        return None

    def student_part(self, artifact: Artifact) -> "StudentPart | None":
        """What the artifact adds to the student to be used, if that is what it is for."""
        return None

    def report(self, artifact: Artifact) -> dict[str, str | list[dict[str, Any]]]:
        """What the report page shows of the artifact, by heading: a sentence, or rows of metrics
        (`step`, `loss`, maybe `dev_spearman`) to be drawn as curves."""
        return {}

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        """Lines that show what an artifact of this kind holds.

        Args:
            open_input: one of its inputs by name.
        """
        return []


@dataclass(frozen=True)
class StudentPart:
    """More files of the student: the artifact's folder `model`, laid over the student's own.

    name: of what the files are, e.g. onnx-int8. usage: Python that loads it from the folder
    `path/to/this/folder`, for the model card. refused: why there are no files; "" where there are.
    """

    name: str
    usage: str
    refused: str = ""


class RowWise(Stage):
    """A stage that makes output shard k from shard k of its first input, in pools of processes."""

    row_wise = True

    @abstractmethod
    def open(self, work: Work) -> Callable[[int], Shard]:
        """Loads what a process needs for all its shards; returns what makes one by its number."""

    def passes(self) -> Sequence[Callable[[Work], Callable[[int], Shard | None]]]:
        """Functions like `open` that each shard goes through in turn, a pool of processes each.

        All but the last return None for a shard and leave what they made under `Work.scratch`.
        """
        return [self.open]

    def finish(self, work: Work) -> None:
        """Publishes, once all shards are there; called in the driver."""
        work.publish({})


Role = Literal["before", "baseline", "teacher", "after"]


@dataclass(frozen=True)
class Figure:
    """One measured number.

    name: heading of its column. better: which direction is. interval: 95%, or the range of
    repetitions. percent: a share or correlation times 100, shown in the bar chart. averaged: the
    table adds a mean over the figures that carry the same word. parts: of subsets. by_seed: of
    trainings with several seeds, whose mean the figure then is.
    """

    name: str
    value: float
    better: Literal["higher", "lower", "neither"] = "higher"
    interval: tuple[float, float] | None = None
    decimals: int = 2
    percent: bool = False
    averaged: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    by_seed: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class EncoderLabel:
    """Whose figures these are: the student before or after training, a teacher or a baseline.

    ranks: with rank similarities (RankEncoder) instead of plain cosines. documents: the teacher
    that embeds what the student's vectors are compared with; "" for the student itself. variant: of
    the exported student, such as onnx-int8; "" for the student itself. dimensions: that its vectors
    are cut to; 0 for all. seed: of one of several trainings; None where there is one, and for the
    mean over all.
    """

    role: Role
    name: str
    ranks: bool = False
    documents: str = ""
    variant: str = ""
    dimensions: int = 0
    seed: int | None = None

    @property
    def title(self) -> str:
        is_student = self.role in ("before", "after")
        title = f"student {self.role}" if is_student else self.name
        title += f" to {self.documents}" if self.documents else ""
        title += f", {self.variant}" if self.variant else ""
        title += f", {self.dimensions} dimensions" if self.dimensions else ""
        return f"{title} + ranks" if self.ranks else title

    @property
    def is_student(self) -> bool:
        """Whether these are the trained student's own figures, with nothing else at work."""
        return self.role == "after" and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether these are of the whole vectors of an encoder as it is, compared by cosines."""
        return not any((self.ranks, self.documents, self.variant, self.dimensions))


@dataclass(frozen=True)
class Measurement:
    """Figures of one encoder."""

    encoder: EncoderLabel
    figures: list[Figure]

    def plain(self) -> dict[str, Any]:
        """As JSON data, which knows finite numbers only: null is there instead of others."""

        def is_json(value: Any) -> bool:
            return not isinstance(value, float) or math.isfinite(value)

        found: dict[str, Any] = _numbers(asdict(self), is_json, None)
        return found

    @staticmethod
    def read(raw: dict[str, Any]) -> "Measurement":
        figures = []
        for one in raw["figures"]:
            has_interval = one["interval"] is not None
            one = _numbers(one, lambda value: value is not None, math.nan)
            one["interval"] = tuple(one["interval"]) if has_interval else None
            figures.append(Figure(**one))
        return Measurement(EncoderLabel(**raw["encoder"]), figures)


def _numbers(raw: Any, keeps: Callable[[Any], bool], instead: float | None) -> Any:
    """Plain data with another value in place of those that are not kept."""
    if isinstance(raw, dict):
        return {key: _numbers(item, keeps, instead) for key, item in raw.items()}
    if isinstance(raw, list | tuple):
        return [_numbers(item, keeps, instead) for item in raw]
    return raw if keeps(raw) else instead


def measured(
    measurements: Sequence[Measurement], notes: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """Stats of an artifact that holds figures, as tables, pages and searches read them.

    Args:
        notes: lines below the table.
    """
    return {"measured": [one.plain() for one in measurements], "notes": list(notes), **more}
