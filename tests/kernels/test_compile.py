"""Every kernel compiles for GPUs that this machine does not have: no spills, states loaded 16 bytes at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability, tmp_path):
    """In a process of its own, because the tests run Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-P", str(Path(__file__).parent / "compile_kernels.py"), str(capability)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len({name.split(" {")[0] for name in found}) == 10  # kernels and variants, in all shipped tile sizes
    for name, usage in found.items():
        assert usage["spills"] == 0, (name, usage)
        if "conv" not in name:
            assert usage["wide_loads"] >= 8, (name, usage)
