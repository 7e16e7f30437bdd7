"""What every endpoint's settings have in common. Imports neither torch nor Ray.

Settings say where to ask, what it may cost and how patient to be. The model, and whatever else is
in a request, is identity; where it is sent, how fast and for how much money is not.
"""

import re
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from stages.credentials import clear_credential
from stages.settings import Settings, execution, late


class Budget(Settings):
    """What may be spent on one artifact, over all runs.

    A run that reaches a limit stops. Raise the limit and run again to continue.
    """

    max_requests: int | None = execution(
        None, ge=1, description="Most requests that are answered; null: no limit."
    )
    max_tokens: int | None = execution(
        None, ge=1, description="Most tokens, of what is sent and of answers; null: no limit."
    )
    max_cost: float | None = execution(
        None, gt=0, description="Highest cost, in the currency of the prices; null: no limit."
    )
    price_per_million_prompt_tokens: float | None = execution(
        None, ge=0, description="Price of a million tokens that are sent, for max_cost."
    )

    @model_validator(mode="after")
    def _prices(self) -> "Budget":
        if self.max_cost is not None and self.cost(0, 0) is None:
            missing = [
                name for name in type(self).model_fields
                if name.startswith("price") and getattr(self, name) is None
            ]  # fmt: skip
            raise ValueError(f"max_cost needs {' and '.join(missing)}")
        return self

    @property
    def price_of_answers(self) -> float | None:
        """Price of a million answer tokens; None where it is not known."""
        return 0.0

    def cost(self, prompt_tokens: float, answer_tokens: float) -> float | None:
        """What so many tokens cost; None where a price is not known."""
        prices = self.price_per_million_prompt_tokens, self.price_of_answers
        if prices[0] is None or prices[1] is None:
            return None
        return (prompt_tokens * prices[0] + answer_tokens * prices[1]) / 1e6


class EndpointSettings(Settings):
    """An OpenAI-compatible endpoint.

    section: what the recipe calls such settings, for messages. route: what is asked, below
    `base_url`. answer_name: what it answers. reserved: fields of a request that `extra` must leave
    alone, and why. lowers_tokens: the setting that makes a request smaller. sent: the settings that
    an endpoint may refuse.
    """

    section: ClassVar[str]
    route: ClassVar[str]
    answer_name: ClassVar[str]
    reserved: ClassVar[tuple[str, ...]]
    reserved_because: ClassVar[str]
    lowers_tokens: ClassVar[str]
    sent: ClassVar[str]

    model: str = Field(min_length=1, description="Name of the model as the endpoint knows it.")
    extra: dict[str, Any] = late(
        {},
        description="Further fields of the request, sent as they are. ${VARIABLES} are filled in "
        "when the request is sent. The fingerprint covers their names, not their values.",
    )
    base_url: str = execution(
        "https://api.openai.com/v1",
        description="Address of the endpoint; the route (/chat/completions or /embeddings) is "
        "added.",
    )
    key_variable: str | None = execution(
        "OPENAI_API_KEY", description="Environment variable that holds the key; null: send no key."
    )
    concurrency: int = execution(32, ge=1, description="Most requests in flight.")
    requests_per_minute: int | None = execution(
        None, ge=1, description="Most requests a minute, of the whole stage; null: no limit."
    )
    tokens_per_minute: int | None = execution(
        None, ge=1, description="Most tokens a minute, of the whole stage; null: no limit."
    )
    timeout_seconds: float = execution(60.0, gt=0, description="Time-out of one request.")
    max_attempts: int = execution(
        6, ge=1, description="How often to send a request that fails while others are answered."
    )
    budget: Budget = execution(Budget(), description="Limits on what the stage may spend.")

    @property
    def most_answer_tokens(self) -> int:
        """Tokens that an answer may cost, beside those that were sent."""
        return 0

    @property
    def most_answer_bytes(self) -> int:
        """A longer answer is not read."""
        return 1 << 20

    @classmethod
    def late_fields(cls) -> list[str]:
        """Fields whose ${VARIABLES} are filled in when a request is sent."""
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return [name for name, one in extras.items() if isinstance(one, dict) and one.get("late")]

    @model_validator(mode="after")
    def _address_has_no_secret(self) -> "EndpointSettings":
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or address.fragment:
            raise ValueError("base_url is not an http(s) address such as http://localhost:8000/v1")
        try:
            address.port  # noqa: B018 - raises where it is no number, or too large
        except ValueError:
            raise ValueError(f"the port of base_url '{self.base_url}' is not one") from None
        if address.query:
            raise ValueError(
                "base_url has a query (?...), and none can be sent: a key in it would be saved "
                "with every run. Give the address without it (Azure's ends in /openai/v1), and the "
                "key by key_variable"
            )
        if "@" in address.netloc:
            raise ValueError(
                "credentials do not belong into base_url (it is saved with every run); put the key "
                "into an environment variable and name that in key_variable"
            )
        return self

    @field_validator("key_variable")
    @classmethod
    def _names_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(
                "what is there is no name of an environment variable; put the key into one, and "
                "write its name here"
            )
        return name

    @model_validator(mode="after")
    def _extra_leaves_the_rest_alone(self) -> "EndpointSettings":
        for name in self.reserved:
            if name in self.extra:
                raise ValueError(f"extra must not contain '{name}': {self.reserved_because}")
        return self

    @model_validator(mode="after")
    def _credentials_are_variables(self) -> "EndpointSettings":
        for name in self.late_fields():
            if where := clear_credential(getattr(self, name)):
                raise ValueError(
                    f"{name}.{where} looks like a credential, and {name} is saved with every run; "
                    "put it into an environment variable and write ${NAME} here"
                )
        return self
