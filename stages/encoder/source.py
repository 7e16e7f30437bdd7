"""Which encoder a stage uses: its settings and, if a recipe trains it, that training.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from stages.contract import Fingerprinted, Work
from stages.encoder.config import (
    check_config,
    default_prompt,
    described_in,
    is_on_hub,
    model_config,
    once_unseen,
    resolved,
    space_is_part_of_a_token,
    state_width,
)
from stages.encoder.modules import read_pipeline
from stages.encoder.prompts import kind_prompts, with_kind_prompts
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError

# Of encoders whose template has a space before the sentence that may be part of a token: until 1
# that space was a token of its own. Others have no such mark: what they made is found as before.
TEMPLATE_TOKENS = 2

E = TypeVar("E", bound=EncoderSettings, covariant=True)


class Training(Protocol):
    """The stage that makes a model, as far as whoever uses the model looks at it."""

    @property
    def student(self) -> "EncoderSource[Any]":
        """What it is made from."""

    def output_config(self) -> dict[str, Any]:
        """What the model's config.json will say."""

    def output_width(self) -> int | None:
        """Width of the model's vectors; None where only the training knows."""


@dataclass(frozen=True)
class EncoderSource(Generic[E]):
    """An encoder of a recipe.

    training: what makes the model when `settings.model` names a recipe's student; the node that
        uses it then reads that training under the name `settings.model`.
    node: name of that training in the graph.
    has_kinds: whether the recipe's sentences are of two kinds, which have prompts of their own.
    whole: the encoder before its vocabulary was cut, where that is what `training` does.
    """

    settings: E
    training: Training | None = None
    node: str = ""
    has_kinds: bool = False
    whole: "EncoderSource[E] | None" = None

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """What a node with this encoder reads: (its own name for it, the graph's)."""
        return [(self._input, self.node)] if self.training is not None else []

    @property
    def _input(self) -> str:
        return self.settings.model if self.whole is None else self.node

    @property
    def makes_kinds(self) -> bool:
        """Whether a recipe with sentences of two kinds makes the model, which then has prompts."""
        return self.training is not None and self.training.student.has_kinds

    def identity(
        self,
        inputs: Mapping[str, Fingerprinted],
        where: str = "encoder",
        place: str = "encoder",
    ) -> dict[str, Any]:
        """The encoder's settings under `encoder.`: the same encoder is the same artifact as a
        teacher, a student's start or in another recipe.

        Args:
            where: path of the settings, for messages. place: instead of `encoder`, of a second one.
        """
        found = self.settings.identity(where)
        found.pop("revision")  # part of the model's description where it matters
        if space_is_part_of_a_token(self.settings):
            found["template_tokens"] = TEMPLATE_TOKENS
        prompt = default_prompt(self.settings)
        if prompt:  # which was once left out
            found["prompt"] = prompt
        if unseen := once_unseen(self.settings):
            found["computed"] = unseen
        if self.has_kinds and self.training is None and not self.settings.prompts:
            own = kind_prompts(self.settings)
            if {*own.values()} - {resolved(self.settings).prompt or ""}:  # once left out
                found["kind_prompts"] = own
        if self.training is not None:
            made = "recipe" if self.whole is None else "vocabulary"
            found["model"] = {made: inputs[self._input].fingerprint}
        return {f"{place}.{key}": value for key, value in found.items()}

    @property
    def packages(self) -> tuple[str, ...]:
        """See `Stage.packages`."""
        is_pipeline = self.training is None and resolved(self.settings).pooling == "pipeline"
        return ("sentence-transformers",) if is_pipeline else ()

    def located(self, work: Work) -> E:
        """The settings with a model that a node makes named by its folder and, where there are
        kinds, the prompts of all of them."""
        settings = self.settings
        if self.training is not None:
            model = work.input(self._input).folder_path("model")
            settings = settings.model_copy(update={"model": str(model)})
        return with_kind_prompts(settings) if self.has_kinds else settings

    def config(self) -> dict[str, Any]:
        """The model's config.json, or what it will be; may ask the hub.

        Raises:
            UserError: no such model, or see `resolved`.
        """
        if self.training is not None:
            return self.training.output_config()
        resolved(self.settings)
        if self.has_kinds:
            kind_prompts(self.settings)
        return model_config(self.settings)

    def width(self) -> int | None:
        """Width of its vectors; None where only who loads it knows: behind Dense modules, in
        sentence-transformers' own pipelines.

        Raises:
            UserError: as `config`.
        """
        if self.training is not None:
            return self.training.output_width()
        settings: EncoderSettings = resolved(self.settings)
        if settings.pooling == "pipeline" or read_pipeline(described_in(settings)).dense:
            return None
        return state_width(self.config())

    def cut_widths(self, widths: Sequence[int]) -> list[int]:
        """Those of the widths that its vectors can be cut to: the widest first, without their own.
        That of a model of the hub is not known before it is fetched.

        Raises:
            UserError: as `config`.
        """
        begun: EncoderSource[Any] = self
        while begun.training is not None:
            begun = begun.training.student
        own = self.width() if widths and not is_on_hub(begun.settings) else None
        return sorted({*widths} - {own}, reverse=True)

    def check(self, max_length: int | None = None) -> None:
        """Compares the settings with the model's configuration.

        Args:
            max_length: tokens read instead of the settings'.

        Raises:
            UserError: no such model, a layer that is not there, more tokens than positions.
        """
        settings: EncoderSettings = self.settings
        if max_length is not None:
            settings = settings.model_copy(update={"max_length": max_length})
        config = self.config()
        is_table = self.training is not None and config.get("num_hidden_layers") == 0
        if is_table and (settings.trained or settings.layers is not None):
            raise UserError(
                f"model '{settings.model}': that recipe's student is a static table "
                "(student.layers: 0), which has no layers to keep or to train; name its model"
            )
        check_config(settings, config)
