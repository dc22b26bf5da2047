"""The picture of docs/parallel.md: who holds which tokens, and what travels beneath what.

    python -m benchmarks.report.parallel_picture        writes docs/parallel.svg

The upper half is counted (`nsa.parallel`), the lower half shows an order of events and no durations.
"""

from __future__ import annotations

from harness.repository import ROOT
from nsa import NSAConfig
from nsa.io import atomic_write
from nsa.parallel import TokenOrder, deal_documents, head_tail

PICTURE = "docs/parallel.svg"
RANKS = 4
TOKENS = 65536
DOCUMENTS = (0, 36000, 41000, 65536)
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px } .title { font-weight: 600 }
.on { fill: #fff } .dark { fill: #1f2328 } .line { stroke: #1f2328; stroke-width: 2 }
.compute { fill: #6e7781 } .travel { fill: none; stroke: #6e7781; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .on { fill: #fff } .dark { fill: #1f2328 }
.line { stroke: #e6edf3 } .travel { stroke: #9da7b3 } }
"""
FORWARD = (
    (("compressed attention, choice", 150, 330), ("selected", 330, 450), ("window", 450, 530)),
    (("compressed", 60, 148), ("K and V of all tokens", 150, 326)),
)
BACKWARD = (
    (("window", 90, 190), ("selected, head 1", 190, 310), ("head 2", 310, 430), ("compressed", 430, 560)),
    (("K and V again", 60, 188), ("halo", 192, 240), ("dk, dv of head 1", 312, 428), ("of head 2", 432, 540)),
)


def svg() -> str:
    """The whole picture."""
    ends = TokenOrder(TOKENS, tuple(((r * TOKENS // RANKS, (r + 1) * TOKENS // RANKS),) for r in range(RANKS)))
    rows = (
        ("end to end", ends, None),
        ("head-tail", head_tail(TOKENS, RANKS), None),
        ("head-tail", head_tail(TOKENS, RANKS), DOCUMENTS),
        ("dealt tiles", deal_documents(DOCUMENTS, RANKS, NSAConfig()), DOCUMENTS),
    )
    parts = [_text(20, 26, f"Who holds which of {TOKENS:,} tokens: 4 ranks", "title")]
    parts.append(_text(600, 26, "most loaded rank", "title"))
    for i, (name, order, documents) in enumerate(rows):
        parts.append(_order(52 + 44 * i, name, order, documents))
    for i, (title, lanes) in enumerate((("Forward", FORWARD), ("Backward", BACKWARD))):
        parts.append(_timeline(262 + 96 * i, title, lanes))
    legend = "".join(
        f'<rect x="{600 + 50 * r}" y="268" width="12" height="12" fill="{colour}"/>{_text(616 + 50 * r, 279, str(r))}'
        for r, colour in enumerate(COLOURS)
    )
    parts.append(_text(600, 258, "rank") + legend)
    parts.append(_text(600, 312, "filled: computed", "small") + _text(600, 328, "outlined: on its way", "small"))
    size = 'viewBox="0 0 800 450" width="800" height="450"'
    label = "Orders of tokens over four ranks with the work of the most loaded one, and what travels beneath what"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _order(y: int, name: str, order: TokenOrder, documents: tuple[int, ...] | None) -> str:
    """One row: the sequence in the colours of the ranks, and by how much one has too much to do."""
    place = {token: 120 + 460 * token / TOKENS for own in order.pieces for piece in own for token in piece}
    drawn = [
        f'<rect x="{place[first]:.1f}" y="{y}" width="{place[last] - place[first]:.1f}" height="24" '
        f'fill="{COLOURS[rank]}"/>'
        for rank, own in enumerate(order.pieces)
        for first, last in own
    ]
    for bound in (documents or ())[1:-1]:
        x = 120 + 460 * bound / TOKENS
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 5}" y2="{y + 29}" class="line"/>')
    share = order.imbalance(NSAConfig(), documents)
    packed = "3 documents" if documents else "one document"
    words = _text(20, y + 11, name) + _text(20, y + 26, packed, "small")
    return words + "".join(drawn) + _text(600, y + 17, f"{share:+.1%} work")


def _timeline(y: int, title: str, lanes: tuple[tuple[tuple[str, int, int], ...], ...]) -> str:
    """What is computed, and beneath it what is on its way."""
    drawn = [_text(20, y - 6, title, "title")]
    for lane, (kind, words) in enumerate((("compute", "small on"), ("travel", "small"))):
        for name, first, last in lanes[lane]:
            box = f'<rect x="{first}" y="{y + 34 * lane}" width="{last - first - 2}" height="28" class="{kind}"/>'
            drawn.append(box + _text(first + 6, y + 34 * lane + 18, name, words))
    return "".join(drawn)


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{words}</text>"


if __name__ == "__main__":
    atomic_write(ROOT / PICTURE, svg())
