"""What a run prints: one line per repro, a table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from regression.runner import FAULTY, PRODUCT, Finding
from regression.verdict import gravest

_LONGEST_WHY = 160  # characters; the whole is in the record and in JUnit's XML


def progress(finding: Finding, done: int, total: int, elapsed_s: float) -> str:
    """[ 3/62   12 s] dup-blocks             faulty   WRONG         caught: row 3 lists block 2 twice"""
    width = len(str(total))
    repro = finding.repro
    head = f"[{done:>{width}}/{total} {elapsed_s:4.0f} s] {repro.incident.id:<22} {repro.part:<8}"
    return f"{head} {finding.verdict.value:<13} {_in_a_line(_outcome(finding))}".rstrip()


def _in_a_line(why: str) -> str:
    words = " ".join(why.split())
    return words if len(words) <= _LONGEST_WHY else f"{words[: _LONGEST_WHY - 1]}…"


def _outcome(finding: Finding) -> str:
    if finding.reason is not None:
        return finding.reason if finding.lawful_skip else f"RED: {finding.reason}"
    return f"caught: {gravest(finding.aspects).why}" if finding.repro.part == FAULTY else ""


def table(findings: Sequence[Finding]) -> str:
    """One line per incident: whether its detector fired, what was judged on the product, and how long both took."""
    lines = [f"{'incident':<22} {'fault':<24} {'product':<13} {'seconds':>8}  looked at"]
    for incident_id in dict.fromkeys(finding.repro.incident.id for finding in findings):
        own = [finding for finding in findings if finding.repro.incident.id == incident_id]
        by_part = {finding.repro.part: finding for finding in own}
        product = by_part.get(PRODUCT)
        looked_at = ", ".join(f"{aspect.name} {aspect.verdict.value}" for aspect in product.aspects) if product else ""
        seconds = sum(finding.pace.seconds for finding in own)
        lines.append(
            f"{incident_id:<22} {_detector(by_part.get(FAULTY)):<24} {product.verdict.value if product else '':<13} "
            f"{seconds:>8.1f}  {looked_at}".rstrip()
        )
    return "\n".join(lines)


def _detector(faulty: Finding | None) -> str:
    if faulty is None:
        return ""
    if faulty.lawful_skip:
        return faulty.verdict.value
    return f"{'caught' if faulty.ok else 'NOT CAUGHT'}: {faulty.verdict.value}"
