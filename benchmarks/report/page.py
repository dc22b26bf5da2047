"""From what was found to HTML. Jinja escapes every text, so that no record can put markup on a page."""

from __future__ import annotations

from typing import Any

import jinja2

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("benchmarks.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **content: Any) -> str:
    """One page. Raises jinja2.UndefinedError where the template asks for what is not given."""
    return _ENVIRONMENT.get_template(template).render(**content)
