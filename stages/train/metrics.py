"""Metric rows as JSON lines and as TensorBoard scalars."""

import json
from pathlib import Path
from typing import Any


class MetricWriter:
    """Appends metric rows to `metrics.jsonl` and a TensorBoard event file in one folder."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._board = SummaryWriter(str(folder))
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        self._lines.write(json.dumps(row) + "\n")
        self._lines.flush()
        for name, value in row.items():
            if name not in ("step", "num_steps"):
                self._board.add_scalar(f"train/{name}", value, row["step"])

    def close(self) -> None:
        self._lines.close()
        self._board.close()
