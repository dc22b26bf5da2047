"""Run each `run:` block of a workflow as it is written, in order: what CI does there is what is checked here.

python .ci/steps.py .github/workflows/checks.yml
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml


def main(path: Path) -> int:
    """The exit code of the first block that fails, else 0."""
    workflow = yaml.safe_load(path.read_text())
    shell = workflow["defaults"]["run"]["shell"].replace("{0}", "").split()
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            if "run" not in step:
                continue
            block, environment = step["run"], {**job.get("env", {}), **step.get("env", {})}
            if any("${{" in text for text in (block, *environment.values())):
                raise ValueError(f"{path}: {name}: {step['name']!r} needs what only the workflow's host knows")
            print(f"\n=== {name}: {step['name']}", flush=True)
            begin = time.perf_counter()
            code = subprocess.run([*shell, "-c", block], env={**os.environ, **environment}).returncode
            print(f"=== {step['name']}: exit code {code}, {time.perf_counter() - begin:.0f} s", flush=True)
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
