"""The command line: called in the process of the tests, or started in a process of its own."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.cli import main
from tests.support.recipes import write_recipe


class Sentray:
    """Runs commands.

    Args:
        folder: the working folder.
        address: the Ray cluster that processes join.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.said = ""  # all that commands in this process have printed, errors included

    def recipe_file(self, recipe: dict[str, Any]) -> str:
        return write_recipe(self.folder / "recipe.yaml", recipe)

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """What the command prints: on stdout, or on stderr where it is to fail with `code`.

        It runs in this process, in the Ray session of the tests.
        """
        out, err = io.StringIO(), io.StringIO()
        with chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            found = main([str(argument) for argument in arguments])
        self.said += out.getvalue() + err.getvalue()
        assert found == code, out.getvalue() + err.getvalue()
        return out.getvalue() if code == 0 else err.getvalue()

    def start(self, *arguments: object) -> "subprocess.Popen[str]":
        """The command in a process of its own, as users run it: to be killed, or beside others."""
        command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
        if arguments[0] in ("run", "tune"):
            command += ["--address", self.address]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder
        )

    def wait(self, process: "subprocess.Popen[str]", happened: Callable[[], object]) -> None:
        """Until something is so; the process must not end before."""

        def is_so() -> object:
            if found := happened():
                return found
            assert process.poll() is None, process.communicate()
            return False

        wait_until(is_so)

    def wait_for_idle(self) -> None:
        """Until a killed driver's workers are gone, so that nothing of it writes any more."""
        import ray

        wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def wait_until(happened: Callable[[], object], pause: float = 0.05) -> None:
    """Until something is so. The pause is a poll's: spinning would take one of two cores, and
    asking a cluster is work for it too."""
    while not happened():
        time.sleep(pause)


def made(storage: str) -> dict[str, int]:
    """Every published manifest and finished shard, with its time of writing (ns)."""
    root = Path(storage)
    files = [*root.glob("*/*/manifest.json"), *root.glob("*/*/shards/*.json")]
    return {str(file.relative_to(root)): file.stat().st_mtime_ns for file in files}


def student_weights(storage: str) -> bytes:
    """The weights file of the storage's only trained student."""
    return student_file(storage, "model/model.safetensors").read_bytes()


def student_file(storage: str, name: str) -> Path:
    """A file of the storage's only training, as its manifest has it."""
    (manifest,) = Path(storage).glob("train/*/manifest.json")
    path = json.loads(manifest.read_text())["files"][name]["path"]
    return manifest.parent / str(path)
