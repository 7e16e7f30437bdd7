"""What a job runs on the cluster's head: says where it is, compares versions, runs the command.

Recipes and files of the job lie beside it and are named from there, wherever it was started.

It lies at the top of the job's package and imports only the standard library before the versions
are compared: with another Sentray installed there, or none, this must still be able to say so.
"""

import importlib
import json
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path


def main() -> None:
    os.chdir(Path(__file__).parent)
    job = json.loads(Path(__file__).with_name("job.json").read_text(encoding="utf-8"))
    found, wanted = _versions(), job["versions"]
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    print(f"on {socket.gethostname()}: {shown}", flush=True)
    problems = [
        f"{name} is {found[name] or 'missing'} there and {version} here"
        for name, version in wanted.items()
        if found[name] != version
    ]
    if found["Sentray"] != wanted["Sentray"]:
        print(
            "sentray: " + "; ".join(problems) + ". Install that Sentray in the cluster's image, or "
            "write `sentray: sent` into the cluster's file",
            file=sys.stderr,
        )
        sys.exit(2)
    for problem in problems:
        print(f"warning: {problem} (where the job was submitted)", flush=True)
    importlib.import_module("pipeline.run.passed").take(Path.cwd())
    code = importlib.import_module(job["module"]).main(job["arguments"])
    importlib.import_module("pipeline.run.stopping").end_process(code)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for title, package in (("Ray", "ray"), ("Sentray", "sentray")):
        try:
            found[title] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[title] = None
    return found


if __name__ == "__main__":
    main()
