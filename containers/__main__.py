"""The host's side of the containers.

    python -m containers image --family a100      build the image for a family (default: for what is here)
    python -m containers run -- python -m pytest  run a command in the image for what is here
    python -m containers preflight                engine, driver, GPU inside the container, room on the disk
    python -m containers pipeline --base main     all of it in turn, as CI does, with a summary for a reviewer
    python -m containers publish --registry ghcr.io/OWNER/NAME     what takes long to build, for other machines

Exit code: the command's own; 2 for a wrong argument, another machine than asked for, or an engine that does not do its
part; 130 where it was interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from containers import container, engine, host, image, pipeline
from harness import environment, machines, repository
from harness.arguments import Parser, time_s
from harness.environment import Environment
from harness.interrupt import INTERRUPTED

ROOM_GB = {"cpu": 8, "gpu": 40}
"""Free disk that building an image and running the suites in it takes."""


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    told = environment.read()
    top = Parser(prog="python -m containers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    summaries = {
        "image": "build an image",
        "run": "run a command in it",
        "preflight": "check that this machine can run the suites",
        "pipeline": "image, preflight, tests, regress, bench, compare, report, comment",
        "publish": "build the layers of packages under a family's image, and push them to a registry",
    }
    subs = {name: commands.add_parser(name, help=summary) for name, summary in summaries.items()}
    for sub in subs.values():
        _add_machine(sub, told)
    for name in ("image", "run", "preflight", "publish"):
        _add_recipe(subs[name], told)
    for name in ("image", "pipeline", "publish"):
        subs[name].add_argument(
            "--registry",
            required=name == "publish",
            metavar="NAME",
            help="where `publish` keeps packages: they are pulled from there in place of being built (default: none)",
        )
    for name in ("run", "preflight"):
        _add_surroundings(subs[name], told)
    subs["run"].add_argument("--repository", action="store_true", help="run in the working tree, with its git history")
    subs["run"].add_argument("words", nargs="+", metavar="-- command", help="what to run")
    subs["pipeline"].add_argument(
        "--base",
        metavar="COMMIT",
        help=f"what `compare` judges against; {pipeline.LAST_MEASURED}: the newest commit before this one that this"
        " machine has measured (default: no compare)",
    )
    subs["pipeline"].add_argument(
        "--budget",
        type=_time,
        metavar="TIME",
        help="spend about so long (20m) on bench, and on compare; what is left out is named",
    )
    subs["pipeline"].add_argument("--cases", metavar="A,B", help="--cases of bench and of compare (default: theirs)")
    subs["pipeline"].add_argument("--quick", action="store_true", help="some tests, quick benches: minutes")
    subs["pipeline"].add_argument(
        "--logs",
        type=Path,
        default=repository.ROOT / "results" / "pipeline",
        metavar="DIR",
        help="(default: results/pipeline)",
    )
    return top


def _time(text: str) -> str:
    """As it is typed, which the sessions read again, once it is a time."""
    time_s(text)
    return text


def _add_machine(sub: argparse.ArgumentParser, told: Environment) -> None:
    sub.add_argument(
        "--engine",
        choices=(*engine.NAMES, engine.NONE),
        default=told.engine,
        help="(default: NSA_ENGINE, else docker, then podman, then none)",
    )
    sub.add_argument(
        "--family",
        choices=(*machines.image_families(), host.ANY_GPU, host.CPU),
        help="refuse any other GPU; 'gpu' is any (default: what is here, else cpu)",
    )


def _add_recipe(sub: argparse.ArgumentParser, told: Environment) -> None:
    sub.add_argument(
        "--base-image",
        default=told.base_image,
        metavar="NAME",
        help="in place of nvidia/cuda (default: NSA_BASE_IMAGE, else the Dockerfile's)",
    )
    sub.add_argument(
        "--wheels",
        type=Path,
        default=told.wheels,
        metavar="DIR",
        help="wheels to take before any others (default: NSA_WHEELS, else none)",
    )


def _add_surroundings(sub: argparse.ArgumentParser, told: Environment) -> None:
    sub.add_argument("--image", metavar="NAME", help="use this image, which exists already; build none")
    sub.add_argument(
        "--results",
        type=Path,
        default=told.results,
        metavar="DIR",
        help="the host's folder for results (default: NSA_RESULTS, else results)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = parser().parse_args(argv)
    try:
        environment.check()
        chosen = engine.choose(arguments.engine)
        print(chosen.message, flush=True)
        if arguments.command == "pipeline":
            return chain(chosen, arguments)
        if chosen.engine is None:
            raise engine.EngineError("an image needs a container engine; install Docker or Podman")
        commands = {"image": build, "run": run, "preflight": preflight, "publish": publish}
        return commands[arguments.command](chosen.engine, arguments)
    except (engine.EngineError, host.HostError, ValueError, OSError) as error:
        print(f"python -m containers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m containers: interrupted", file=sys.stderr)
        return INTERRUPTED


def build(found: engine.Engine, arguments: argparse.Namespace) -> int:
    """An image can be built for a GPU that is elsewhere."""
    begin = time.perf_counter()
    name = image.build(found, _recipe(arguments), arguments.registry)
    print(f"image: {name}  {image.identity(found, name)}  {time.perf_counter() - begin:.1f} s")
    return 0


def publish(found: engine.Engine, arguments: argparse.Namespace) -> int:
    """The packages of an image, for machines that would build them from the same locks."""
    image.publish(found, _recipe(arguments), arguments.registry)
    return 0


def _recipe(arguments: argparse.Namespace) -> image.Recipe:
    asked = arguments.family
    family = asked if asked in (*machines.image_families(), host.CPU) else host.target(asked).family
    return image.recipe(family, arguments.base_image, arguments.wheels)


def run(found: engine.Engine, arguments: argparse.Namespace) -> int:
    """Everything that can be refused is refused before anything is built."""
    target = _target(arguments)
    name = _image(found, target, arguments)
    line = container.command(found, target, name, arguments.words, arguments.results, working_tree=arguments.repository)
    return container.run(found, target, line)


def preflight(found: engine.Engine, arguments: argparse.Namespace) -> int:
    """One line per check; the first that fails ends it."""
    target = _target(arguments)
    if target.gpu is None:
        print("GPU: none; the suites run on the CPU")
    else:
        print(f"GPU: {target.gpu.name}, driver {target.gpu.driver}, CUDA {image.cuda_version()} in the image")
    free_gb = shutil.disk_usage(repository.ROOT).free / 1e9
    wanted_gb = ROOM_GB["cpu" if target.gpu is None else "gpu"]
    if free_gb < wanted_gb:
        raise host.HostError(
            f"{repository.ROOT} has {free_gb:.0f} GB free; an image and its suites need {wanted_gb} GB"
        )
    print(f"disk: {free_gb:.0f} GB free")
    name = _image(found, target, arguments)
    look = ["python", "-c", "import torch; print('inside: torch', torch.__version__, 'CUDA', torch.version.cuda)"]
    line = container.command(found, target, name, look, arguments.results, working_tree=False)
    return container.run(found, target, line)


def chain(chosen: engine.Choice, arguments: argparse.Namespace) -> int:
    """Every step; 1 where one is red. The summary is printed last, and kept beside the logs."""
    logs: Path = arguments.logs
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise host.HostError(f"cannot write {logs}: {error.strerror}. Name another folder with --logs") from error
    base = arguments.base
    if base == pipeline.LAST_MEASURED:
        base = pipeline.last_measured(host.target(arguments.family).expect, environment.read().results)
    steps = pipeline.plan(
        chosen,
        arguments.family,
        base,
        quick=arguments.quick,
        logs=logs,
        registry=arguments.registry,
        budget=arguments.budget,
        cases=arguments.cases,
    )
    done = pipeline.run(steps, logs)
    comparison = logs / pipeline.COMPARISON
    text = pipeline.summary(done, comparison.read_text() if comparison.exists() else "")
    (logs / pipeline.SUMMARY).write_text(text)
    print(f"\n{text}\nThe logs: {logs}")
    if any(one.code == INTERRUPTED for one in done):
        return INTERRUPTED
    return int(any(one.code for one in done))


def _target(arguments: argparse.Namespace) -> host.Target:
    target = host.target(arguments.family)
    if target.gpu is not None:
        host.check_driver(target.gpu, image.cuda_version())
    return target


def _image(found: engine.Engine, target: host.Target, arguments: argparse.Namespace) -> str:
    if arguments.image is None:
        return image.build(found, image.recipe(target.family, arguments.base_image, arguments.wheels))
    if image.identity(found, arguments.image) is None:
        raise engine.EngineError(f"--image: {found.name} has no image {arguments.image}")
    return str(arguments.image)


if __name__ == "__main__":
    # A cancelled job and a lost terminal also end their container. In the background of a shell SIGINT is ignored, also
    # by all that is started from here, unless it has a handler: the engine and nox end by it.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)
    sys.exit(main())
