"""Pages that the site has beside those of this folder: one for each public name, and the files that pages link to."""

import html
import importlib
import inspect
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from rlhfkit.cli.parts import ROOMS as ROOMS_OF_PARTS
from rlhfkit.cli.parts import classes, first_sentence

ROOT = Path(__file__).parents[2]
ROOMS = {
    "modules": "Modules",
    "parts": "Parts",
    "losses": "Losses",
    "callbacks": "Callbacks",
    "rollout": "Engines and rollouts",
    "rewards": "Rewards",
    "episodes": "Episodes",
    "datamodules": "DataModules",
    "data": "Records and batches",
    "models": "Models",
    "roles": "Roles elsewhere",
    "strategies": "Strategies",
    "checkpoints": "Checkpoints",
    "costs": "Estimates",
}
"""Rooms of the package that have a chapter of the reference, and its title."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".ipynb": "json"}
LINK_UPWARD = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
"""A link that leaves the folder of its page: to another page, or to a file of the project that is not in ``docs/``."""


def public_names(room: str) -> list[str]:
    """Dotted names of what a room offers; of the parts also those that modules and rollouts take."""
    module = importlib.import_module(f"rlhfkit.{room}")
    if room == "parts":
        found = [f"rlhfkit.parts.{name}" for name in ("Part", "Stage", "Prepare", "Child")]
        kinds = [kind for place in ROOMS_OF_PARTS.values() for kind in classes(place)]
        return found + [f"{kind.__module__}.{kind.__name__}" for kind in kinds]
    return [f"rlhfkit.{room}.{name}" for name in sorted(module.__all__, key=str.lower)]


def object_of(dotted: str) -> Any:
    """The object of a dotted name."""
    owner, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(owner), name)


def summary(dotted: str) -> str:
    """The first sentence of a name's docstring; a constant or an alias of a type has none."""
    found = object_of(dotted)
    if isinstance(found, ModuleType) or inspect.isclass(found) or inspect.isroutine(found):
        return html.escape(first_sentence(found), quote=False).replace("|", r"\|")
    return ""


def reference_pages() -> dict[str, str]:
    """Text of the pages of the reference, by path: of each room a table, and of each name a page."""
    pages = {}
    for room, title in ROOMS.items():
        rows = []
        for dotted in public_names(room):
            name = dotted.rpartition(".")[2]
            pages[f"reference/{room}/{name}.md"] = f"::: {dotted}\n    options: {{heading_level: 1}}\n"
            rows.append(f"| [`{name}`]({name}.md) | {summary(dotted)} |")
        pages[f"reference/{room}/index.md"] = (
            f"# {title}\n\n| Name | What it is |\n|---|---|\n" + "\n".join(rows) + "\n"
        )
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the reference to the navigation, before the pages about development."""
    chapters = []
    for room, title in ROOMS.items():
        names = [dotted.rpartition(".")[2] for dotted in public_names(room)]
        pages = [{name: f"reference/{room}/{name}.md"} for name in names]  # titles of files would be "Dpo loss"
        chapters.append({title: [f"reference/{room}/index.md", *pages]})
    nav: list[Any] = config.nav or []
    nav.insert(len(nav) - 1, {"Reference": chapters})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference, and those of files that pages link to."""
    pages = reference_pages()
    for file in files.documentation_pages():
        for target, _ in LINK_UPWARD.findall(file.content_string):
            if path := outside_docs(file.src_uri, target):
                pages[outside_page(path)] = text_of(ROOT / path)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
        if path.startswith("files/"):
            files.get_file_from_path(path).inclusion = InclusionLevel.NOT_IN_NAV  # type: ignore[union-attr]
    return files


def outside_docs(page: str, target: str) -> str | None:
    """Path in the project of the file that a page's link leads to; ``None`` if it is a page of ``docs/``."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def outside_page(path: str) -> str:
    """Path of the page that shows a file, ``files/tutorials/tool_agent.py.md`` for ``tutorials/tool_agent.py``."""
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def text_of(file: Path) -> str:
    """A page that shows a file: Markdown as it is without its own links, everything else as a block."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return re.sub(r"!?\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)
    if file.suffix == ".ipynb":
        import nbformat

        cells = nbformat.reads(text, as_version=4).cells
        return "\n\n".join(
            f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source for cell in cells
        )
    return f"# {file.name}\n\n````{LANGUAGES.get(file.suffix, '')}\n{text}````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside this folder lead to their pages."""
    if page.file.generated_by or page.file.src_uri.startswith("files/"):
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        path = outside_docs(page.file.src_uri, link[1])
        return f"]({posixpath.relpath(outside_page(path), here)}{link[2] or ''})" if path else link[0]

    return LINK_UPWARD.sub(shown, markdown)
