"""Docstrings as Markdown: links for Sphinx's roles, tables for those of ``===``, no ``::`` before an example."""

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`(?:([^`<]+?)\s*<([^`>]+)>|(~?)([^`]+))`")
TABLE = re.compile(r"^( *)(={2,}(?: +={2,})+)\n((?:.*\n)+?)\1\2\n((?:.*\n)*?)\1\2$", re.MULTILINE)


def link(found: re.Match[str]) -> str:
    """A role as a link; what has no page stays text."""
    title, target, short, name = found.groups()
    target = (target or name).lstrip("~").rstrip("()")
    title = title or (target.rpartition(".")[2] if short else name)
    if not target.startswith("rlhfkit."):
        return f"`{title}`"
    return f'<autoref optional identifier="{target}"><code>{title}</code></autoref>'


def table(found: re.Match[str]) -> str:
    """A simple table of reStructuredText as one of Markdown."""
    indent, rule, head, body = found.groups()
    edges = [(part.start(), part.end()) for part in re.finditer("=+", rule)]
    rows: list[list[str]] = []
    for part in (head, body):
        for line in part.splitlines():
            text = line[len(indent) :]
            last = len(edges) - 1
            cells = [text[start : None if i == last else edges[i + 1][0]].strip() for i, (start, _) in enumerate(edges)]
            if cells[0] or not rows:
                rows.append(cells)
            else:  # a line that continues the row above
                rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(edges))
    return "\n".join(indent + line for line in lines)


def markdown(text: str) -> str:
    """A docstring in Sphinx's markup as Markdown."""
    text = ROLE.sub(link, TABLE.sub(table, text))
    text = re.sub(r"\s*\bExamples?::$", "\n\nExample:", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class SphinxDocstrings(Extension):
    """Changes all docstrings when they are read."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
