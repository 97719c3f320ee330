"""For mkdocs: links from a page to a file outside docs/ become the file's name, since the manual has pages only."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **more: Any) -> str:
    """Called by mkdocs with each page's text."""
    return _OUTSIDE.sub(lambda link: link[1] if link[1] == f"`{link[2]}`" or link[1] == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
