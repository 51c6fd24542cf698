"""What pages, tutorials and benchmarks use must exist: names, arguments, commands, links, files. Nothing is run."""

import ast
import builtins
import importlib
import inspect
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from jsonargparse import auto_cli, capture_parser

import rlhfkit
from rlhfkit.cli.demo import demo_parser
from rlhfkit.cli.doctor import doctor_parser
from rlhfkit.cli.estimate import parser as estimate_parser
from rlhfkit.cli.init import init_parser, packaged
from rlhfkit.cli.main import COMMANDS, FUNCTION_COMMANDS, main
from rlhfkit.cli.report import report_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [
    path
    for folder in ("tutorials", "benchmarks", "docs")
    for path in sorted((ROOT / folder).iterdir())
    if path.suffix in (".py", ".ipynb")
]
PACKAGES = (
    "callbacks",
    "checkpoints",
    "data",
    "datamodules",
    "episodes",
    "losses",
    "models",
    "modules",
    "rewards",
    "rollout",
    "strategies",
)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
DOTTED = re.compile(r"(?<![\w/.])rlhfkit(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"\b(?:tutorials|tests|benchmarks|docs|requirements|rlhfkit)/[\w./-]+\.\w+")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
every_source = pytest.mark.parametrize("page", [*PAGES, *PROGRAMS], ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages, in order."""
    return [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def resolve(dotted: str) -> Any:
    """The object of a dotted name; ``AttributeError`` or ``ImportError`` without one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(dotted)


def public_names() -> set[str]:
    """What rlhfkit and its packages export."""
    return set(rlhfkit.__all__).union(*(importlib.import_module(f"rlhfkit.{name}").__all__ for name in PACKAGES))


def signature(called: Callable[..., Any]) -> inspect.Signature:
    """Of a function or class; ``**kwargs`` of constructors become the arguments of the base class."""
    owners = [vars(owner)["__init__"] for owner in getattr(called, "__mro__", ()) if "__init__" in vars(owner)]
    merged: dict[str, inspect.Parameter] = {}
    for function in owners or [called]:
        own = list(inspect.signature(function).parameters.values())[bool(owners) :]
        positions = not merged or any(value.kind is value.VAR_POSITIONAL for value in merged.values())
        merged = {name: value for name, value in merged.items() if value.kind not in VARIABLE}
        for value in own:
            if value.name not in merged:
                passed = positions or value.kind in VARIABLE
                merged[value.name] = value if passed else value.replace(kind=value.KEYWORD_ONLY)
        if not any(value.kind is value.VAR_KEYWORD for value in own):
            break
    return inspect.Signature(sorted(merged.values(), key=lambda value: (value.kind, value.default is not value.empty)))


def complaint(call: ast.Call, called: Callable[..., Any]) -> str | None:
    """Why a call does not fit a signature; ``None`` if it does. ``...`` and ``**more`` stand for further arguments."""
    given = [value for value in call.args if not (isinstance(value, ast.Constant) and value.value is ...)]
    words = {word.arg: None for word in call.keywords if word.arg is not None}
    partial = len(given) < len(call.args) or len(words) < len(call.keywords)
    bind = signature(called).bind_partial if partial else signature(called).bind
    try:
        bind(*given, **words)
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}"
    return None


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The dotted name and the local name of everything that a block imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def trees(page: Path) -> list[ast.Module]:
    """The Python of a page, notebook or program, block by block; names of earlier blocks are known in later ones."""
    if page.suffix == ".py":
        sources = [page.read_text(encoding="utf-8")]
    elif page.suffix == ".ipynb":
        sources = [cell.source for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "code"]
    else:
        sources = blocks(page, "python")
    return [ast.parse(source, filename=page.name) for source in sources]


@every_source
def test_python_compiles_and_what_it_imports_exists(page: Path) -> None:
    for tree in trees(page):
        for dotted, _ in imports(tree):
            if dotted.startswith("rlhfkit."):
                resolve(dotted)


@every_page
def test_names_of_ours_are_imported_before_they_are_used(page: Path) -> None:
    ours, known, missing = public_names(), set(dir(builtins)), []
    for tree in trees(page):
        known.update(name for _, name in imports(tree))
        known.update(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))
        known.update(
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        known.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        missing += sorted((used & ours) - known)
    assert missing == []


@every_source
def test_calls_fit_the_signatures(page: Path) -> None:
    known: dict[str, Any] = {}
    complaints = []
    for tree in trees(page):
        known.update({name: resolve(dotted) for dotted, name in imports(tree) if dotted.startswith("rlhfkit.")})
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(known.get(node.func.id)):
                complaints.append(complaint(node, known[node.func.id]))
    assert [text for text in complaints if text] == []


@every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    lines = [line for block in blocks(page, "bash", "") for line in block.splitlines() if line.startswith("rlhfkit ")]
    lines += re.findall(r"`(rlhfkit [^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[1] in COMMANDS, line
        if words[1] in FUNCTION_COMMANDS:
            known = inspect.signature(resolve(FUNCTION_COMMANDS[words[1]][1].replace(":", "."))).parameters
            options = [word[2:].split(".")[0].split("=")[0] for word in words if word.startswith("--")]
            assert [option for option in options if option not in known] == [], line


def shell_lines() -> Iterator[tuple[str, str]]:
    """Where a command is written, and the command: pages, tutorials with their notebooks, and our own docstrings."""
    for path in [*PAGES, *PROGRAMS, *sorted((ROOT / "rlhfkit/cli/demo").glob("*.yaml")), *sorted(COMMAND_FILES)]:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r" *\\\n *", " ", text)
        if path in COMMAND_FILES:
            text = re.sub(r"(rlhfkit [^\n]+)\n +(?=--)", r"\1 ", text)  # a line of a docstring goes on in the next
        for line in re.findall(rf"(?:^|[:`]) *(rlhfkit (?:{'|'.join(COMMANDS)}) [^`\n]+)", text, re.MULTILINE):
            if "DATA" not in line and ("--" in line or len(shlex.split(line, comments=True)) > 3):
                yield path.name, line.removesuffix("&").strip()


COMMAND_FILES = {*(ROOT / "rlhfkit" / "cli").glob("*.py")}
SHELL_LINES = sorted({*shell_lines()})
WORD_PARSERS = {"report": report_parser, "init": init_parser, "demo": demo_parser, "doctor": doctor_parser}
PARTIAL = ("score --reward_model", "fit --print_config", "export --adapter")
"""Commands in running text that name one option."""


@pytest.mark.parametrize(("page", "line"), SHELL_LINES)
def test_shell_lines_are_parsed_by_the_command_line(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is run; ``run.yaml`` and ``long.yaml`` of the pages are a tutorial's, ``grpo.yaml`` is the package's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rlhfkit").symlink_to(ROOT / "rlhfkit")
    for name in ("run.yaml", "long.yaml"):
        (tmp_path / name).write_text((ROOT / "rlhfkit/cli/demo/grpo_arithmetic.yaml").read_text())
    (tmp_path / "grpo.yaml").write_text(packaged("grpo").read_text())
    _, command, *words = shlex.split(line, comments=True)
    if f"{command} {words[0]}" in PARTIAL:
        assert page != "README.md"
        return
    if command in FUNCTION_COMMANDS:
        function = resolve(FUNCTION_COMMANDS[command][1].replace(":", "."))
        parser = capture_parser(lambda: auto_cli(function, args=words))
        parser.exit_on_error = False
        parser.parse_args(words)
        return
    if command in WORD_PARSERS:
        WORD_PARSERS[command]().parse_args(words)
        return
    if command == "estimate":
        _, words = estimate_parser().parse_known_args(words)
    with pytest.raises(SystemExit) as ended:
        main([command if command != "estimate" else "fit", *words, "--print_config"])
    assert not ended.value.code, capsys.readouterr().err


@every_page
def test_shell_and_yaml_are_well_formed(page: Path) -> None:
    for block in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    for block in blocks(page, "yaml"):
        assert [*yaml.safe_load_all(block)] != [None], block


@every_page
def test_targets_of_make_and_programs_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks(page, "bash", "") for line in block.splitlines()]
    for words in (shlex.split(line, comments=True) for line in lines if re.match(r"(make|python3?) ", line)):
        if words[0] == "make":
            assert words[1] in targets
        elif words[1] == "-m" and words[2].startswith("benchmarks"):
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists() or (ROOT / words[2].replace(".", "/")).is_dir()
        elif words[1].endswith(".py"):
            assert (ROOT / words[1]).exists() or page.name == "strategy.md", words


@every_page
def test_dotted_names_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for dotted in DOTTED.findall(text):
        resolve(dotted)
    assert [file for file in FILE.findall(text) if not (ROOT / file).exists()] == []


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them in links."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


CODE = re.compile(r"`[^`]+`|\]\([^)]*\)|https?://\S+")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
END = re.compile(r"(?<=[.!?:])[)*]* +(?=[A-Z(*x])")
MOST_WORDS = 40


@every_page
def test_no_sentence_is_above_40_words(page: Path) -> None:
    """Code and the address of a link count as one word; tables have a test of their own."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", page.read_text(encoding="utf-8")), flags=re.DOTALL)
    text = ITEM.sub("\n", re.sub(r"^(?:#|\|).*$", "\n", text, flags=re.MULTILINE))
    paragraphs = (CODE.sub("x", " ".join(one.split())) for one in re.split(r"\n *\n", text))
    sentences = [sentence for paragraph in paragraphs for sentence in END.split(paragraph)]
    assert [one for one in sentences if len(one.split()) > MOST_WORDS] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name not in ("reference", "dev")], ids=lambda page: page.stem
)
def test_no_table_cell_of_the_guide_is_above_20_words(page: Path) -> None:
    rows = re.findall(r"^\|(.*)\|$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", CODE.sub("x", row))]
    assert [cell for cell in cells if len(cell.split()) > 20] == []
