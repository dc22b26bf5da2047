"""`compare` and `run --anchors` measure older commits by today's benches, which ask nsa/ for what it has long had."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

from harness import repository

SINCE_0_1 = {
    "nsa": None,
    "nsa.backends": None,
    "nsa.geometry": None,
    "nsa.loss": None,
    "nsa.model": {"BASE_125M", "SHOWCASE", "DecoderLM", "ModelConfig", "next_token_loss"},
    "nsa.train.distributed": {"Ranks"},
    "nsa.train.settings": {"Data", "Runtime", "Settings", "Train"},
    "nsa.train.trainer": {"Batch", "Trainer"},
}
"""Modules, and names where a module has newer ones (None: any). A new entry is one that older commits lack: they could
no longer be compared."""
PUBLIC = {"Aux", "NSAConfig", "nsa_attention", "backends", "geometry", "loss"}
"""What may be imported from the package itself."""


def test_the_workers_ask_nsa_for_nothing_that_older_commits_lack() -> None:
    ours = "('benchmarks.', 'harness.')"
    script = (
        f"import sys, benchmarks.ab.worker, benchmarks.worker; print(*(m for m in sys.modules if m.startswith({ours})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=repository.ROOT, timeout=120
    )
    paths = [repository.ROOT / (module.replace(".", "/") + ".py") for module in done.stdout.split()]
    asked = {path.stem: sorted(_newer(ast.parse(path.read_text()))) for path in paths if path.is_file()}
    assert {module: names for module, names in asked.items() if names} == {}


def _newer(tree: ast.AST) -> Iterator[str]:
    """What a module imports from nsa that is none of the above."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.startswith("nsa") and x.name not in SINCE_0_1)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nsa":
            module = node.module or ""
            known = PUBLIC if module == "nsa" else SINCE_0_1.get(module, frozenset[str]())
            yield from (f"{module}.{x.name}" for x in node.names if known is not None and x.name not in known)
