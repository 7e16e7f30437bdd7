"""Rewriting by a model that vLLM runs on the cluster's GPUs, through `ray.data.llm`.

Settings, prompt, reading of answers and journal are those of the endpoint; what there is not: a
second try with a reminder (answers come once each), rates and budget. The driver writes the answers
down as they come, so a killed run asks again only for what was on its way.

This is the one place under stages/ that names Ray: vLLM comes through `ray.data.llm`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from stages.contract import Work
from stages.endpoint.credentials import filled, read_variables
from stages.endpoint.journal import Journal, request_key
from stages.errors import UserError
from stages.plain import shortened
from stages.rewrite.chat import Answer, payload, read_answer
from stages.rewrite.rewrites import Outcome
from stages.rewrite.rewriting import Ref, Rewriting
from stages.sentences.texts import read_texts
from stages.variables import hide_values


def rewritten_offline(
    work: Work,
    settings: Rewriting,
    engine: dict[str, Any],
    journal: Journal[Answer],
    rows: Iterator[tuple[Ref, str]],
) -> Iterator[tuple[Ref, Outcome]]:
    """Outcomes of all rows, those first whose answers are in the journal.

    Args:
        engine: what answers, apart from the request: weights and engine options.

    Raises:
        UserError: the cluster has no GPU.
    """
    missing: dict[int, list[int]] = defaultdict(list)

    def key_of(sentence: str) -> bytes:
        return request_key(payload(settings, sentence, []) | {"model": "vllm", "engine": engine})

    for (shard, place), sentence in rows:
        answer = journal.get(key_of(sentence))
        if answer is None:
            missing[shard].append(place)
        else:
            yield (shard, place), read_answer(settings, answer)
    if not missing:
        return
    journal.ready()
    import ray

    def prompts(row: dict[str, Any]) -> list[dict[str, Any]]:
        """A shard's places as a row each."""
        texts = read_texts(work.input("sentences"), int(row["shard"]))
        return [
            {"shard": row["shard"], "place": place, "sentence": texts[place]}
            for place in row["places"]
        ]

    items = [{"shard": shard, "places": places} for shard, places in missing.items()]
    rows_sent = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(prompts)
    failed = False  # the first time is told; what engines say differs for each sentence
    try:
        for row in processor(settings)(rows_sent).iter_rows():
            ref = int(row["shard"]), int(row["place"])
            if error := row.get("__inference_error__"):
                if not failed:
                    said = shortened(" ".join(hide_values(str(error)).split()))
                    work.say(f"vLLM failed at a sentence: {said}", important=True)
                failed = True
                yield ref, Outcome("", reason="failed: vLLM")
                continue
            answer = Answer(
                str(row["generated_text"] or ""), "", int(row.get("num_input_tokens") or 0),
                int(row.get("num_generated_tokens") or 0),
            )  # fmt: skip
            journal.add([(key_of(row["sentence"]), answer)])
            yield ref, read_answer(settings, answer)
    finally:
        journal.close()


def processor(settings: Rewriting) -> Callable[[Any], Any]:
    """vLLM as a function of data sets with the column `sentence`, one engine for each GPU."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        raise UserError(
            "rewriting.engine vllm needs GPUs and this cluster has none; use an endpoint instead"
        )
    config = vLLMEngineProcessorConfig(
        model_source=settings.model,
        engine_kwargs=filled(settings.engine_options, read_variables(settings)),
        concurrency=max(1, gpus // int(settings.engine_options.get("tensor_parallel_size", 1))),
        should_continue_on_error=True,
    )
    return build_processor(config, preprocess=Request(settings))


class Request:
    """A sentence's row as vLLM takes it."""

    def __init__(self, settings: Rewriting) -> None:
        self._settings, self._variables = settings, read_variables(settings)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        body = payload(self._settings, row["sentence"], [])
        messages = body.pop("messages")
        body.pop("model")
        return row | {"messages": messages, "sampling_params": filled(body, self._variables)}
