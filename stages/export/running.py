"""Variants as sentence-transformers runs them: its tokenizer, pooling and modules around a graph.

sentence-transformers' backends load graphs through Optimum (see convert.py). Here the same graph is
run by the same engine in the place of the transformer's forward pass; the rest is the folder's own.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.evaluate.base import Encode
from stages.export.convert import FILES, OUTPUT, load_openvino
from stages.kinds import Kinds, rows_of_kinds
from stages.rows import unit_rows

# Graph inputs by name to token states (B, L, D).
Run = Callable[[dict[str, np.ndarray]], np.ndarray]


def load_folder(folder: Path, trust_remote_code: bool = False, **model_kwargs: Any) -> Any:
    """The exported folder in plain sentence-transformers, on the CPU."""
    from sentence_transformers import SentenceTransformer

    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    return SentenceTransformer(
        str(folder), device="cpu", model_kwargs=model_kwargs, trust_remote_code=trust_remote_code
    )


def load_variant(folder: Path, variant: str, trust_remote_code: bool = False) -> Any:
    """A variant whose files are in the student's folder, as a SentenceTransformer.

    Its graph gets as many threads as torch has, so that both can be timed side by side.
    """
    if variant == "bf16":
        return load_folder(folder, trust_remote_code, variant="bf16", dtype="bfloat16")
    student = load_folder(folder, trust_remote_code)
    file = folder / FILES[variant]
    names, run = _onnx(file) if file.suffix == ".onnx" else _openvino(file)
    student.transformers_model.forward = _forward(names, run)
    return student


def encode_with(student: Any) -> Encode:
    """Texts to unit rows (N, D) float32."""
    rows_of = rows_with(student)
    return lambda texts, kinds=None: unit_rows(rows_of(texts, kinds))


def rows_with(student: Any) -> Encode:
    """Texts to rows (N, D) float32, as the student returns them."""

    def encode(texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        groups = rows_of_kinds(kinds, len(texts))
        found = {}
        for kind, rows in groups.items():
            ways = {None: student.encode, "query": student.encode_query}
            way = ways.get(kind, student.encode_document)
            found[kind] = way([texts[row] for row in rows], show_progress_bar=False)
        order = np.argsort([row for rows in groups.values() for row in rows])
        return np.asarray(np.concatenate([*found.values()])[order])

    return encode


def without_normalize(student: Any) -> Any:
    """The same student but for its last module, which scales vectors to length 1."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(
        modules=[*student][:-1], device="cpu", prompts=student.prompts,
        default_prompt_name=student.default_prompt_name,
    )  # fmt: skip


def _forward(names: Sequence[str], run: Run) -> Callable[..., Any]:
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    def forward(**features: Any) -> Any:
        states = run({name: features[name].numpy() for name in names})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(states))

    return forward


def _onnx(file: Path) -> tuple[list[str], Run]:
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return names, lambda inputs: np.asarray(session.run([OUTPUT], inputs)[0])


def _openvino(file: Path) -> tuple[list[str], Run]:
    import torch

    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = load_openvino().Core().compile_model(str(file), "CPU", threads)
    names = [one.any_name for one in compiled.inputs]
    # copied: the next call writes into the same memory
    return names, lambda inputs: np.array(compiled(inputs)[OUTPUT])
