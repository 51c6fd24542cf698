"""``rlhfkit init``: the configurations that come with the package, a method each, and copies of them to edit.

``rlhfkit fit --config rlhfkit://grpo`` reads one where it is.
"""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "configurations"
SCHEME = "rlhfkit://"


def methods() -> dict[str, str]:
    """What the package has a configuration for: name, and the first line of the file."""
    files = sorted(FOLDER.glob("*.yaml"))
    return {file.stem: file.open(encoding="utf-8").readline().lstrip("# ").strip() for file in files}


def packaged(name: str) -> Path:
    """The file of a configuration of the package.

    Raises:
        ValueError: If there is none of this name.
    """
    file = FOLDER / f"{name}.yaml"
    if name not in methods():
        near = difflib.get_close_matches(name.lower(), methods(), n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"rlhfkit has no configuration {name!r}{guess} It has {', '.join(methods())}")
    return file


def with_files(words: Sequence[str]) -> list[str]:
    """The words of a command line with files in place of names such as ``rlhfkit://grpo``."""
    found = []
    for word in words:
        before, scheme, name = word.partition(SCHEME)
        reads = scheme and before in ("", "--config=", "-c=")
        found.append(f"{before}{packaged(name.removesuffix('.yaml'))}" if reads else word)
    return found


def init_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="rlhfkit init",
        description="Write a configuration with comments, to edit and run. Without a method, list them.",
    )
    parser.add_argument("method", nargs="?", help="its name, such as grpo")
    parser.add_argument("file", nargs="?", type=Path, help="what is written (default: METHOD.yaml)")
    return parser


def init_command(words: Sequence[str]) -> None:
    """Run the command with the words of a command line.

    Raises:
        ValueError: If there is no such method.
        FileExistsError: If the file exists.
    """
    given = init_parser().parse_args(list(words))
    if given.method is None:
        known = methods()
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {title}" for name, title in known.items()))
        print("\nrlhfkit init METHOD writes one with comments; rlhfkit fit --config rlhfkit://METHOD runs it as it is.")
        return
    source = packaged(given.method)
    file = given.file or Path(source.name)
    text = source.read_text(encoding="utf-8").replace(f"--config {source.name}", f"--config {file}")
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise FileExistsError(
            f"{file} exists and is kept: give another name, rlhfkit init {given.method} FILE"
        ) from None
    print(f"wrote {file}; its comments have the sizes for one GPU and for many. Next:")
    print(f"  rlhfkit estimate --config {file} --gpu H100     memory and time, before it runs")
    print(f"  rlhfkit fit --config {file}")
