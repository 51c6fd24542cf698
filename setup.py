"""What setup.cfg cannot say: the text of the package page is README.md with links that work on a package index."""

import re
import runpy
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
"""A link or picture whose target is a file of the project."""


def description(text: str, address: str | None, version: str) -> str:
    """A page with absolute links to the files of a version in a repository on GitHub.

    Without an address a link becomes its text, and a picture is left out.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, shown, target = link.groups()
        if address is None:
            return "" if picture else shown
        return f"{picture}[{shown}]({address}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return RELATIVE.sub(absolute, text)


def source_address() -> str | None:
    """``Source`` of ``project_urls`` in setup.cfg, the one place that has the repository's address."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    urls = re.findall(r"^Source *= *(\S+)$", config.get("metadata", "project_urls", fallback=""), re.MULTILINE)
    return urls[0].rstrip("/") if urls else None


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    version = runpy.run_path(str(ROOT / "rlhfkit" / "_version.py"))["__version__"]
    setup(long_description=description(readme, source_address(), version))
