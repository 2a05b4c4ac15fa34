"""``python tests/xla_flags.py``: flags for tests, of which most of the time goes into compiling programs that run for milliseconds.

A flag that jaxlib does not know ends the process, so those that this one does not know are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys

FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def are_known(flags: tuple[str, ...]) -> bool:
    env = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return (
        subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=env, capture_output=True).returncode
        == 0
    )


def known() -> list[str]:
    return list(FAST) if are_known(FAST) else [flag for flag in FAST if are_known((flag,))]


if __name__ == "__main__":
    print(" ".join([*known(), os.environ.get("XLA_FLAGS", "")]).strip())
