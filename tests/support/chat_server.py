"""A chat endpoint on loopback (tests/support/endpoint_server.py) that is asked about sentences."""

import hashlib
import json
import re
from typing import Any

from tests.support.endpoint_server import EndpointServer, Reply


def rewrite_of(sentence: str) -> str:
    """A good answer about a sentence."""
    found = {"sentence1": f"In other words, {sentence}", "sentence2": f"Never that {sentence}"}
    return json.dumps(found)


class ChatServer(EndpointServer):
    route = "/chat/completions"

    def about(self, body: dict[str, Any]) -> str:
        if body["max_tokens"] == 4:  # not about a sentence: does the endpoint work?
            return ""
        return re.search(r"Sentence: (.*)", body["messages"][0]["content"]).group(1)  # type: ignore[union-attr]

    def paid(self, body: dict[str, Any]) -> list[str]:
        return [hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()]

    def answer(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        return {
            "choices": [{"message": {"role": "assistant", "content": reply.text},
                         "finish_reason": reply.finish_reason}],
            "usage": {"prompt_tokens": 50, "completion_tokens": 20},
        }  # fmt: skip
