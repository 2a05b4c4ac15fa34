"""Run the examples and keep what they print and draw for the documentation.

    python docs/gallery.py [NAME ...]

Each script of ``examples/`` is run with its defaults, one after another. What it prints goes to ``docs/examples/tables/NAME.txt``
and its picture to ``docs/_static/examples/NAME.png``, reduced to what a page needs. The pages of ``docs/examples/`` show both as
they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples"
TABLES = ROOT / "docs" / "examples" / "tables"
PICTURES = ROOT / "docs" / "_static" / "examples"

MAX_WIDTH = 1400  # pixels: twice what a page shows
MAX_BYTES = 150_000
NO_BAR = "--no-progress-bar"


def names() -> list[str]:
    """Names of all examples."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def run(name: str) -> str:
    """What a script prints."""
    script = SCRIPTS / f"{name}.py"
    options = [NO_BAR] * (NO_BAR in script.read_text())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, str(script), "--out", "out", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def machine_facts() -> str:
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(
        f"{package} {importlib.metadata.version(name)}" for package, name in (("JAX", "jax"), ("NumPyro", "numpyro"))
    )
    device = f"{cores} CPU cores" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    return f"{device}, {versions}"


def keep_picture(source: Path, target: Path) -> None:
    """A copy that is no wider than a page needs; with fewer colours, then smaller, where it has too many bytes."""
    with Image.open(source) as file:
        picture = Image.new("RGB", file.size, "white")
        picture.paste(file, mask=file.getchannel("A") if file.mode == "RGBA" else None)
    width = min(picture.width, MAX_WIDTH)
    while True:
        small = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
        # Colours that are far from others, however rare: a bar of colours must keep its ends.
        few = small.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2)
        for candidate in (small, few):
            candidate.save(target, optimize=True)
            if target.stat().st_size < MAX_BYTES:
                return
        width = int(0.9 * width)


def keep(name: str, printed: str) -> None:
    TABLES.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    (TABLES / f"{name}.txt").write_text(f"$ make {name}\n{printed.rstrip()}\n({machine_facts()})\n")
    keep_picture(ROOT / "out" / f"{name}.png", PICTURES / f"{name}.png")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples to run; by default all")
    chosen = parser.parse_args(argv).names or names()
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(names())}")
    for name in chosen:
        print(f"{name} ...", end=" ", flush=True)
        start = time.perf_counter()
        keep(name, run(name))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
