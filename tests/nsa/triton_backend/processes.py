"""Run a module of this folder in a process without Triton's interpreter, and read the JSON that it prints last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def answer(module: str, *arguments: object, forced: str = "") -> Any:
    """`forced`: the architecture that the process is forced to, whatever the tests are."""
    own = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH")  # the latter is left by Triton where these tests are forced
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["NSA_FORCE_ARCH"] = forced
    command = [sys.executable, "-m", f"tests.nsa.triton_backend.{module}", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
