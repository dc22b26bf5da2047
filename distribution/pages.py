"""Hooks of `mkdocs.yml`: the documents at the repository's top become pages, and links to sources lead to its site.

A link that leaves docs/ would be broken on the pages. One to a file that is there becomes a link to it at this commit
on the site of git's origin, or plain text where there is none. A broken link stays as it is, so the strict build fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.report import links
from harness import repository

DOCS = "docs"
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Documents at the top, and the pages that they become."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents at the top, and the pictures outside docs/ that documents show."""
    for source, page in TOP.items():
        files.append(File.generated(config, page, content=(repository.ROOT / source).read_text()))
    for source in sorted(pictures()):
        files.append(File.generated(config, source, abs_src_path=str(repository.ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """The page with its links as they are on the site."""
    return linked(markdown, page.file.src_uri, base_url())


def base_url() -> str | None:
    """Where this commit's files are shown, without a slash at the end; None where that is not known."""
    site, commit = links.of_checkout(), repository.commit()
    return f"{site}/blob/{commit}" if site and commit else None


def linked(markdown: str, page: str, base: str | None) -> str:
    """A document's text with its relative links as they are on the page `page`, a path within the site."""

    def replaced(match: re.Match[str]) -> str:
        bang, text, target, anchor = match.groups()
        source = _source(page, target)
        if source is None or not (repository.ROOT / source).exists():
            return match[0]
        place = TOP.get(source) or (posixpath.relpath(source, DOCS) if source.startswith(f"{DOCS}/") else None)
        if bang and place is None:
            place = source
        if place is not None:
            return f"{bang}[{text}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"
        return f"[{text}]({base}/{quote(source)}{anchor})" if base else text

    return _LINK.sub(replaced, markdown)


def pictures() -> set[str]:
    """The files outside docs/ that a document shows, by their paths in the repository."""
    documents = {page: repository.ROOT / source for source, page in TOP.items()}
    below = repository.ROOT / DOCS
    documents |= {path.relative_to(below).as_posix(): path for path in below.rglob("*.md")}
    shown = {
        _source(page, target)
        for page, document in documents.items()
        for bang, _, target, _ in _LINK.findall(document.read_text())
        if bang
    }
    return {
        source
        for source in shown
        if source and not source.startswith(f"{DOCS}/") and (repository.ROOT / source).is_file()
    }


def _source(page: str, target: str) -> str | None:
    """The path in the repository that a link of a page's document means; None for another site's."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    folder = "" if page in TOP.values() else posixpath.dirname(f"{DOCS}/{page}")
    path = posixpath.normpath(posixpath.join(folder, target.replace("\\", "")))
    return None if PurePosixPath(path).parts[:1] == ("..",) else path
