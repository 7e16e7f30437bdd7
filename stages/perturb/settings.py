"""Settings of the perturb stage: three interchangeable sources of rewrites. Imports nothing heavy.

A recipe may name several, and training draws one rewrite of a sentence at random.
"""

import re
import string
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from stages.encoder.settings import ModelSettings
from stages.errors import UserError
from stages.packages import need
from stages.sentences_settings import SourceKind
from stages.settings import VARIABLE, Settings, execution, late

# As in DenoSent's appendix: a paraphrase, and a sentence that contradicts the given one or is about
# something else. The appendix's prompt also asks for variety in length.
PROMPT = """\
Rewrite the sentence below in two ways.
sentence1: a paraphrase that keeps its meaning in other words and another structure.
sentence2: a sentence that contradicts it or has nothing to do with it, of about the same length.
Answer with nothing but a JSON object: {{"sentence1": "...", "sentence2": "..."}}
Sentence: {sentence}"""


class Filters(Settings):
    """Which rewrites are rejected. Lengths and similarities are measured in characters."""

    min_growth: float = Field(0.3, ge=0, description="Shortest rewrite, as a share of the source.")
    max_growth: float = Field(3.0, gt=0, description="Longest rewrite, as a share of the source.")
    max_similarity: float = Field(
        0.98,
        gt=0,
        le=1,
        description="Near copies: highest normalised edit similarity with the source, case and "
        "white space aside. 1 keeps all but exact copies.",
    )
    max_repeats: int = Field(
        3, ge=1, description="Most times in a row that one to four words may come."
    )
    script: str | None = Field(
        "LATIN",
        description="Unicode script that at least half of the letters must be of; null: any.",
    )
    language: str | None = Field(
        None,
        description="ISO 639-1 code that py3langid must find; null: any. Unsure below 30 "
        "characters, which pass.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Filters":
        if self.min_growth > self.max_growth:
            raise ValueError(f"min_growth {self.min_growth} is above max_growth {self.max_growth}")
        return self


class Pairs(Settings):
    """Rewrites that you have: a file with a sentence (or its id) and a rewrite in each row."""

    path: str = Field(description="A table, or a folder whose files are read in name order.")
    source: SourceKind | None = Field(None, description="Kind of file; null: by its suffix.")
    invalid_utf8: Literal["error", "reject"] = Field(
        "error", description="Lines that are not UTF-8: stop, or drop and count them."
    )
    sentence_column: str | None = Field(
        "sentence1", description="Column of the sentence, to join by its text."
    )
    id_column: str | None = Field(
        None, description="Column of the sentence's id (as in the published sentences) instead."
    )
    rewrite_column: str = Field("sentence2", description="Column of the rewrite.")
    negative_column: str | None = Field(
        None, description="Column of a sentence that must not be close: a hard negative."
    )
    unknown: Literal["error", "reject"] = Field(
        "error", description="Rows whose sentence is not in the corpus: stop, or drop and count."
    )

    @model_validator(mode="after")
    def _one_key(self) -> "Pairs":
        if (self.sentence_column is None) == (self.id_column is None):
            raise ValueError("set either sentence_column or id_column, and the other to null")
        return self


class TranslationModel(ModelSettings):
    prefix: str = Field(
        "",
        description="Put before every sentence: `>>fra<< ` for Marian models of several target "
        "languages, `translate English to German: ` for T5.",
    )


class BackTranslation(Settings):
    """There and back through another language, with sequence-to-sequence models."""

    to_pivot: TranslationModel = Field(
        TranslationModel(model="Helsinki-NLP/opus-mt-en-zh", prefix=">>cmn_Hans<< "),
        description="Translates away.",
    )
    from_pivot: TranslationModel = Field(
        TranslationModel(model="Helsinki-NLP/opus-mt-zh-en"), description="Translates back."
    )
    engine: Literal["ctranslate2", "transformers"] = Field(
        "ctranslate2", description="ctranslate2 converts Marian and its kin; the other runs any."
    )
    precision: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32", description="Arithmetic; int8 is for ctranslate2."
    )
    num_beams: int = Field(4, ge=1, description="Width of the beam search; 1 is greedy.")
    temperature: float | None = Field(
        None,
        gt=0,
        description="Draw tokens at this temperature; null: search for the best.",
    )
    top_k: int = Field(0, ge=0, description="Draw from this many best tokens; 0: from all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw from the best tokens of this mass.")
    seed: int = Field(0, ge=0, description="Of the draws.")
    max_growth: float = Field(
        2.0,
        gt=0,
        description="Most tokens of a translation, as a multiple of its source's, plus 10.",
    )
    no_repeat_ngram: int = Field(
        4, ge=0, description="No sequence of this many tokens comes twice; 0: no such guard."
    )
    max_length: int = Field(
        128, ge=3, description="A sentence (or pivot) of more tokens is rejected, never cut."
    )
    tokens_per_batch: int = execution(
        2048, ge=1, description="Token budget (padding included) of one batch, before beams."
    )
    rows_per_unit: int = execution(
        256, ge=1, description="Sentences between commits: what a kill can cost."
    )
    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", description="auto takes the GPU that Ray assigned, if any."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "BackTranslation":
        if self.temperature is None and (self.top_k or self.top_p < 1):
            raise ValueError("top_k and top_p need a temperature: without one nothing is drawn")
        if self.temperature is not None and self.num_beams > 1:
            raise ValueError("temperature draws tokens and needs num_beams: 1")
        if self.precision == "int8" and self.engine != "ctranslate2":
            raise ValueError("precision int8 needs engine: ctranslate2")
        for model in (self.to_pivot, self.from_pivot):
            if model.recipe_file is not None:
                raise ValueError("a translation model cannot be a recipe's student")
        return self


def check_translation_folder(model: str, folder: Path | None, model_type: str) -> None:
    """Raises UserError where a local Marian folder lacks its vocabularies.

    Without them transformers makes up an empty vocabulary.
    """
    if folder is None or model_type != "marian":
        return
    files = ("source.spm", "target.spm", "vocab.json")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(f"model '{model}': the folder lacks {', '.join(missing)}")


def check_translation_packages(model: str, engine: str, model_type: str) -> None:
    """Raises UserError where the packages that a model needs on an engine are not installed."""
    needed = ["ctranslate2"] if engine == "ctranslate2" else []
    if model_type == "marian":
        needed += ["sentencepiece", "sacremoses"]
    if needed:
        need("translation", f"translating with model '{model}'", *needed)


class Budget(Settings):
    """What may be spent on one artifact, over all runs; reaching it stops, and can be continued."""

    max_requests: int | None = execution(None, ge=1, description="Answered requests.")
    max_tokens: int | None = execution(None, ge=1, description="Prompt and answer tokens.")
    max_cost: float | None = execution(None, gt=0, description="In the prices' currency.")
    price_per_million_prompt_tokens: float | None = execution(None, ge=0, description="Price.")
    price_per_million_answer_tokens: float | None = execution(None, ge=0, description="Price.")

    @model_validator(mode="after")
    def _prices(self) -> "Budget":
        prices = (self.price_per_million_prompt_tokens, self.price_per_million_answer_tokens)
        if self.max_cost is not None and None in prices:
            raise ValueError("max_cost needs both prices per million tokens")
        return self


CREDENTIAL_WORDS = {"authorization", "auth", "password", "passwd", "secret", "credential",
                    "credentials", "bearer", "cookie", "apikey"}  # fmt: skip
CREDENTIAL_PAIRS = re.compile(r"(api|access|private|secret|subscription|account|auth)_?keys?(_|$)")
TEXT_TOKENS = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "image"}


def _clear_credential(value: Any, inside: bool = False) -> str | None:
    """Where a value that a header or account field is named after stands in clear text.

    Args:
        inside: whether a name above it says so.
    """
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if (
                found := _clear_credential(item, inside or _names_credential(str(key)))
            ) is not None:
                return f"{key}.{found}".rstrip(".")
        return None
    if not isinstance(value, str) or not value or VARIABLE.search(value):
        return None
    return "" if inside or re.match(r"(bearer|basic)\s+\S", value, re.IGNORECASE) else None


def _names_credential(key: str) -> bool:
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())
    words = set(name.split("_"))
    token = "token" in words and not words & TEXT_TOKENS
    return token or bool(words & CREDENTIAL_WORDS) or bool(CREDENTIAL_PAIRS.search(name))


class Rewriting(Settings):
    """A chat model writes the rewrites: behind an OpenAI-compatible endpoint, or vLLM on Ray."""

    model: str = Field(
        min_length=1, description="Model name sent to the endpoint; for vllm a hub id or folder."
    )
    engine: Literal["endpoint", "vllm"] = Field(
        "endpoint", description="endpoint: HTTP. vllm: offline on the cluster's GPUs."
    )
    prompt: str = Field(PROMPT, description="With {sentence}; other braces are doubled.")
    rewrite_field: str = Field("sentence1", description="JSON field of the rewrite.")
    negative_field: str | None = Field(
        "sentence2", description="JSON field of the hard negative; null: none."
    )
    temperature: float = Field(1.0, ge=0)
    max_answer_tokens: int = Field(256, ge=1, description="Sent as max_tokens.")
    extra: dict[str, Any] = late(
        {},
        description="More fields of the request, as they are. ${VARIABLES} are filled in when it "
        "is sent: their names are part of the fingerprint, what they stand for is not.",
    )
    max_answers: int = Field(
        3, ge=1, description="How often a sentence is asked for if answers cannot be used."
    )
    base_url: str = execution(
        "https://api.openai.com/v1", description="Of the endpoint; /chat/completions is added."
    )
    key_variable: str | None = execution(
        "OPENAI_API_KEY", description="Environment variable with the key; null: none is sent."
    )
    concurrency: int = execution(32, ge=1, description="Requests in flight at most.")
    requests_per_minute: int | None = execution(None, ge=1, description="Of the whole stage.")
    tokens_per_minute: int | None = execution(None, ge=1, description="Of the whole stage.")
    timeout_seconds: float = execution(60.0, gt=0, description="Of one request.")
    max_attempts: int = execution(
        6, ge=1, description="Tries of one request that fails while others are answered."
    )
    engine_options: dict[str, Any] = late(
        {},
        description="vllm: options of its engine, such as max_model_len or quantization; they may "
        "change what it answers, so they are part of the fingerprint.",
    )
    budget: Budget = execution(Budget(), description="What may be spent.")

    @model_validator(mode="after")
    def _address_has_no_secret(self) -> "Rewriting":
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise ValueError("base_url is not an http(s) address such as http://localhost:8000/v1")
        if "@" in address.netloc or address.query:
            raise ValueError(
                "credentials do not belong into base_url (it is saved with every run); put the key "
                "into an environment variable and name that in key_variable"
            )
        return self

    @model_validator(mode="after")
    def _extra_leaves_the_rest_alone(self) -> "Rewriting":
        for name in ("model", "messages", "temperature", "max_tokens", "max_completion_tokens",
                     "n", "stream"):  # fmt: skip
            if name in self.extra:
                raise ValueError(
                    f"extra must not contain '{name}': it is set by model, prompt, temperature or "
                    "max_answer_tokens, or one plain answer a request is counted on"
                )
        return self

    @model_validator(mode="after")
    def _credentials_are_variables(self) -> "Rewriting":
        for name in ("extra", "engine_options"):
            if where := _clear_credential(getattr(self, name)):
                raise ValueError(
                    f"{name}.{where} looks like a credential, and {name} is saved with every run; "
                    "put it into an environment variable and write ${NAME} here"
                )
        return self

    @model_validator(mode="after")
    def _prompt_names_the_sentence(self) -> "Rewriting":
        try:
            fields = [
                name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None
            ]
        except ValueError as error:
            raise ValueError(f"prompt: {error}; braces that are text must be doubled") from None
        if fields != ["sentence"]:
            raise ValueError(
                "prompt must contain {sentence} exactly once and no other field "
                f"(it has {fields or 'none'}); braces that are text must be doubled"
            )
        return self


class PerturbSettings(Settings):
    name: str = Field(description="Names the rewrites.", pattern=r"^[a-z0-9][a-z0-9._-]*$")
    pairs: Pairs | None = None
    backtranslation: BackTranslation | None = None
    rewriting: Rewriting | None = None
    filters: Filters = Filters()

    @model_validator(mode="after")
    def _one_source(self) -> "PerturbSettings":
        given = [self.pairs, self.backtranslation, self.rewriting]
        if sum(source is not None for source in given) != 1:
            raise ValueError("name exactly one of: pairs, backtranslation, rewriting")
        return self

    @property
    def gives_negatives(self) -> bool:
        """Whether its rewrites may come with hard negatives."""
        if self.rewriting is not None:
            return self.rewriting.negative_field is not None
        return self.pairs is not None and self.pairs.negative_column is not None
