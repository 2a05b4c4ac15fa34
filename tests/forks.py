"""Python scripts in processes of their own, which need not import the libraries: each is forked from one that has.

The libraries take seconds to import, most of what a script of a few small steps takes. ``python tests/forks.py`` imports them and
waits. It runs nothing: a process that has used JAX has threads, and cannot be forked. For each line of its input, the words after
``python`` and where to run them, it forks, and writes the exit status.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

IMPORTS = ("numpyro_orthgp", "matplotlib.pyplot", "optax")  # of nearly every script


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run(words: list[str], cwd: Path, env: dict[str, str], timeout: float) -> Done:
    """``python`` with these words, as ``subprocess.run``. Processes with equal environments come from the same one.

    :param words: a script's path or "-m" and a module, and arguments.
    :param timeout: seconds, after which the process ends with status -14.
    """
    server, imports = _server(tuple(sorted((k, v) for k, v in env.items() if not k.startswith("PYTEST_CURRENT"))))
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        request = {"words": words, "cwd": str(cwd), "files": files, "timeout": timeout}
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        stdout, stderr = (Path(file).read_text() if answer else "" for file in files)
        return Done(json.loads(answer) if answer else 1, stdout, Path(imports).read_text() + stderr)


@functools.cache
def _server(env: tuple[tuple[str, str], ...]) -> tuple[subprocess.Popen[str], str]:
    """A waiting process, and the file of what it says on standard error, such as warnings of imports."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as says:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": says, "text": True}
        server = subprocess.Popen([sys.executable, "-P", __file__], env=dict(env), **pipes)
    atexit.register(os.unlink, says.name)
    atexit.register(server.communicate)  # at the end of its input it ends
    return server, says.name


def wait() -> None:
    import gc
    import importlib

    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            return become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def become(words: list[str], cwd: str, files: list[str], timeout: float) -> None:
    """What ``python`` does with these words."""
    for number, path in enumerate([os.devnull, *files]):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    signal.alarm(int(timeout))
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    wait()
