"""One command in a container: what it may see, who owns what it writes, and how it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from containers import image
from containers.engine import Engine
from containers.host import Target
from harness import interrupt, repository

PASSED_ON = ("CUDA_VISIBLE_DEVICES", "HYPOTHESIS_PROFILE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Variables of the caller that decide what is measured or tried."""
SYSTEM = (
    "/", "/bin", "/cache", "/dev", "/etc", "/home", "/lib", "/opt", "/proc", "/root", "/run", "/sys", "/tmp", "/usr",
    "/var",
)  # fmt: skip
"""A volume over one of these would hide what the image has there."""
LABEL = "nsa.suite"
"""On every container: a runner stops what a killed job left with `docker ps --filter label=nsa.suite`."""
STOP_S = 30
"""How long an interrupted suite may take to write down what it finished."""
ENGINE_FAILED = 125  # docker run's and podman run's own
_WRITTEN = ("--out", "--file", "--junitxml", "--junit-xml")
"""Options whose value is a path that the command writes: that path must be the host's."""


def command(
    engine: Engine, target: Target, image_name: str, words: Sequence[str], results: Path, *, working_tree: bool
) -> list[str]:
    """The engine's command line. `working_tree`: run in the host's, read-only, with its git history."""
    results = results.resolve()
    results.mkdir(parents=True, exist_ok=True)  # else the engine makes it, owned by root
    line = [engine.name, "run", "--rm", "--init", "--name", _name(target), "--network", "none", "--shm-size", "2g"]
    line += ["--hostname", "localhost"]  # without a network no other name resolves, and ranks meet at their host's name
    line += [*engine.user_flags, "--label", LABEL, "--volume", f"nsa-{target.family}-{os.getuid()}:/cache"]
    words, folders = _written(words)
    modes = dict.fromkeys(_repository() if working_tree else (), "ro")
    modes.update(dict.fromkeys((results, *folders), "rw"))
    line += _volumes(modes)
    if working_tree:
        line += ["--workdir", str(repository.ROOT), *_author()]
    line += ["--env", f"NSA_RESULTS={results}"]
    line += ["--env", f"NSA_EXPECT={target.expect}", "--env", f"NSA_IMAGE={image.identity(engine, image_name)}"]
    for name in PASSED_ON:
        if name in os.environ:
            line += ["--env", name]
    if target.gpu is not None:
        line += engine.gpu_flags
    return [*line, image_name, *words]


def _repository() -> list[Path]:
    """The working tree, and where its git history is: elsewhere for a worktree."""
    found = repository.git("rev-parse", "--path-format=absolute", "--git-common-dir")
    history = Path(found) if found is not None else repository.ROOT
    return [repository.ROOT] if history.is_relative_to(repository.ROOT) else [repository.ROOT, history]


def _author() -> list[str]:
    """The caller's name as git knows it: in the container there is neither a global configuration nor such a user."""
    line = []
    for variable, key in (("GIT_AUTHOR_NAME", "user.name"), ("GIT_AUTHOR_EMAIL", "user.email")):
        if value := os.environ.get(variable) or repository.git("config", key):
            line += ["--env", f"{variable}={value}"]
    return line


def _volumes(modes: Mapping[Path, str]) -> list[str]:
    """Folders of the host under their own names. Raises ValueError for one that a volume cannot have."""
    line = []
    for folder, mode in modes.items():
        if ":" in str(folder):
            raise ValueError(f"a folder that is given to a container must not have ':' in its path; got {folder}")
        if str(folder) in SYSTEM:
            raise ValueError(f"what is written must lie in a folder of its own; {folder} is one that the image has too")
        line += ["--volume", f"{folder}:{folder}:{mode}"]
    return line


def _name(target: Target) -> str:
    return f"nsa-{target.family}-{os.getpid()}"


def _written(words: Sequence[str]) -> tuple[list[str], list[Path]]:
    """The words with absolute paths where the command writes, and the folders that must be the host's."""
    told, folders = list(words), []
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in _WRITTEN or (not equals and index + 1 == len(words)):
            continue
        path = Path(value if equals else words[index + 1]).resolve()
        folder = path if option == "--out" else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(folder)
        told[index if equals else index + 1] = f"{option}={path}" if equals else str(path)
    return told, folders


def run(engine: Engine, target: Target, line: Sequence[str]) -> int:
    """Run it to its end; its exit code. An interrupt is passed on once, and what does not stop is stopped."""
    # in a process group of its own: the terminal's Ctrl-C would reach it beside the one that is passed on
    with interrupt.deferred() as let_through:
        process = subprocess.Popen(line, start_new_session=True)
        try:
            let_through()
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # whoever read this may be gone
                print(f"containers: stopping {_name(target)}", file=sys.stderr, flush=True)
            code = _stopped(engine, target, process)
    if code == ENGINE_FAILED and target.gpu is not None:
        print(_why_no_gpu(engine), file=sys.stderr)
    return code


def _stopped(engine: Engine, target: Target, process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        subprocess.run([engine.name, "stop", "--time", "5", _name(target)], capture_output=True)
        return process.wait()


def _why_no_gpu(engine: Engine) -> str:
    return (
        f"containers: {engine.name} could not start the container; its own words are above. If they are about the GPU:"
        " Install the NVIDIA Container Toolkit and register it with the engine, or use --engine none"
        " (docs/containers.md)"
    )
