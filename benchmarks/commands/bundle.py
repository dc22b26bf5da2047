"""`bundle`: the records of a machine that somebody else has: `bundle verify FILE`, `bundle merge FILE`.

Both hold the bundle's files to their hashes and limits and read every record; `merge` then brings the records into
--out, all or none, and builds the pages. Merging again adds nothing. Exit code 1 where a bundle is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.commands import options
from benchmarks.commands.report import build_page
from benchmarks.contact import received
from benchmarks.contact.bundle import BundleError
from benchmarks.contact.received import ReceivedBundle

SUMMARY = "verify or merge the bundle of a first contact"
VERIFY, MERGE = "verify", "merge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do with which file."""
    parser.add_argument("action", choices=(VERIFY, MERGE))
    parser.add_argument("file", type=Path, metavar="FILE", help="a .tar.gz that `first-contact` made")
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Verify or merge; the last line of stdout is JSON."""
    try:
        with received.opened(arguments.file) as bundle:
            summary = _summary(bundle)
            if arguments.action == MERGE:
                options.check_writable(arguments.out)
                merged = received.merge_into(bundle, arguments.out)
                for one in merged.refused:
                    print(f"note: {one}")
                summary |= {"new_lines": merged.new_lines, "known_lines": merged.known_lines}
                summary["page"] = str(build_page(arguments.out))
    except BundleError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    print(json.dumps(summary))
    return 0


def _summary(bundle: ReceivedBundle) -> dict[str, object]:
    where = bundle.manifest.fingerprint
    commit = (where.commit or "unknown")[:10]
    print(f"{where.device} ({where.machine}), {where.utc}, commit {commit}: {bundle.manifest.state}")
    print(f"{len(bundle.manifest.files)} files, {bundle.records} records, sha256 of its manifest {bundle.sha256}")
    return {
        "machine": where.machine,
        "device": where.device,
        "complete": bundle.manifest.complete,
        "smoke": bundle.manifest.smoke,
        "records": bundle.records,
        "sha256": bundle.sha256,
    }
