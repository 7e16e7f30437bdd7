"""The files of a variant, named as sentence-transformers' backends look for them.

sentence-transformers exports through Optimum, whose releases do not import with the transformers
that trains here. So the graph comes from torch's own ONNX exporter, with the inputs and the output
that Optimum's loaders expect, and OpenVINO's from that. 8 bits are what sentence-transformers has:
dynamic quantisation for ONNX, static for OpenVINO, here calibrated on sentences of the corpus.
"""

import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Where a variant's file is in the student's folder.
FILES = {
    "onnx": "onnx/model.onnx",
    "onnx-int8": "onnx/model_qint8.onnx",
    "openvino": "openvino/openvino_model.xml",
    "openvino-int8": "openvino/openvino_model_qint8.xml",
    "bf16": "model.bf16.safetensors",
}
OUTPUT = "last_hidden_state"
MORE = ".data"  # the weights' own file, beside a graph of more than 1.5 GB: protobuf ends at 2.1 GB


def write_onnx(student: Any, file: Path) -> None:
    """The transformer of a SentenceTransformer as an ONNX graph, float32, any batch and length."""
    import torch

    backbone = student.transformers_model
    known = inspect.signature(backbone.forward).parameters
    sample = student.tokenizer(["a sentence", "another one, of other length"], padding=True,
                               return_tensors="pt")  # fmt: skip
    names = [name for name in sample if name in known]

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.backbone(**dict(zip(names, inputs, strict=True)))[0]
            return states

    both = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with quiet("torch.onnx"):
        program = torch.onnx.export(
            Graph().eval(), tuple(sample[name] for name in names), dynamo=True, verbose=False,
            input_names=names, output_names=[OUTPUT], dynamic_shapes=((both,) * len(names),),
        )  # fmt: skip
    assert program is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    program.save(str(file))


def quantise_onnx(source: Path, file: Path) -> None:
    """Dynamic quantisation: weights int8 by channel, activations measured as they come.

    Weights keep 7 of 8 bits: with all 8, x86 processors without VNNI overflow in silence.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file.parent.mkdir(parents=True, exist_ok=True)
    with quiet("root"):
        quantize_dynamic(
            str(source), str(file), weight_type=QuantType.QInt8, per_channel=True,
            reduce_range=True, use_external_data_format=Path(f"{source}{MORE}").exists(),
        )  # fmt: skip


def write_openvino(source: Path, file: Path) -> None:
    """An ONNX file as OpenVINO's two files, float32."""
    openvino = load_openvino()
    file.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(openvino.convert_model(str(source)), str(file), compress_to_fp16=False)


def quantise_openvino(source: Path, file: Path, student: Any, sentences: Sequence[str]) -> None:
    """Static quantisation (NNCF) of OpenVINO's files, calibrated on sentences."""
    openvino = load_openvino()
    import nncf

    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(str(source))
    names = {name for one in model.inputs for name in one.names}
    rows = [
        {key: value for key, value in tokens.items() if key in names}
        for tokens in (
            student.tokenizer(
                [text], truncation=True, max_length=student.max_seq_length, return_tensors="np"
            )
            for text in sentences
        )
    ]
    quantised = nncf.quantize(
        model, nncf.Dataset(rows), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(quantised, str(file), compress_to_fp16=False)


def write_bfloat16(source: Path, file: Path) -> None:
    """The weights of `source` (safetensors) in bfloat16: what transformers calls a variant."""
    import torch
    from safetensors.torch import load_file, save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    cast = {name: weights.to(torch.bfloat16) for name, weights in load_file(source).items()}
    save_file(cast, file, metadata={"format": "pt"})


def load_openvino() -> Any:
    """The package, without its telemetry: it, and NNCF, would report their use to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Without advice of a library's logger that nobody can follow here."""
    logger = logging.getLogger(None if name == "root" else name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
