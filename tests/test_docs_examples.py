"""What pages, tutorials and benchmarks use must exist: names, arguments, commands, links, files; the site is built."""

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import auto_cli, capture_parser

import rlhfkit
from rlhfkit.argument_names import constructor_arguments
from rlhfkit.cli.estimate import parser as estimate_parser
from rlhfkit.cli.init import packaged
from rlhfkit.cli.main import FUNCTION_COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [
    path
    for folder in ("tutorials", "benchmarks", "docs")
    for path in sorted((ROOT / folder).iterdir())
    if path.suffix in (".py", ".ipynb")
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
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


def public_objects() -> dict[str, Any]:
    """What rlhfkit and its packages export."""
    names = [one.name for one in pkgutil.iter_modules(rlhfkit.__path__) if one.ispkg] + ["modules.parts"]
    rooms = [rlhfkit, *(importlib.import_module(f"rlhfkit.{name}") for name in names)]
    return {name: getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())}


def complaint(call: ast.Call, called: Callable[..., Any]) -> str | None:
    """Why a call does not fit a signature; ``None`` if it does. ``...`` and ``**more`` stand for further arguments."""
    given = [value for value in call.args if not (isinstance(value, ast.Constant) and value.value is ...)]
    words = {word.arg: None for word in call.keywords if word.arg is not None}
    partial = len(given) < len(call.args) or len(words) < len(call.keywords)
    signature = inspect.signature(called)
    try:
        (signature.bind_partial if partial else signature.bind)(*given, **words)
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}"
    inherits = inspect.isclass(called) and "kwargs" in signature.parameters  # they go to the base class
    unknown = {*words} - {*constructor_arguments(called)} if inherits else None
    return f"{ast.unparse(call)}: no argument {unknown}" if unknown else None


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
        import nbformat

        sources = [cell.source for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "code"]
    else:
        sources = blocks(page, "python")
    return [ast.parse(source, filename=page.name) for source in sources]


@every_source
def test_python_compiles_and_what_it_imports_and_calls_exists(page: Path) -> None:
    """Pages import names of ours before they use them; linters see to it in programs."""
    ours, names, imported = {*public_objects()}, set(dir(builtins)), dict[str, Any]()
    missing, complaints = [], []
    for tree in trees(page):
        nodes = list(ast.walk(tree))
        imported |= {name: resolve(dotted) for dotted, name in imports(tree) if dotted.startswith("rlhfkit.")}
        names.update(name for _, name in imports(tree))
        names.update(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))
        names.update(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        names.update(node.arg for node in nodes if isinstance(node, ast.arg))
        if page in PAGES:
            missing += sorted(({node.id for node in nodes if isinstance(node, ast.Name)} & ours) - names)
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(imported.get(node.func.id)):
                complaints.append(complaint(node, imported[node.func.id]))
    assert missing == []
    assert [text for text in complaints if text] == []


COMMAND_FILES = sorted((ROOT / "rlhfkit" / "cli").glob("*.py"))


def shell_lines() -> Iterator[tuple[str, str]]:
    """A command, and a place where it is written: pages, tutorials with their notebooks, and our own docstrings."""
    for path in [*PAGES, *PROGRAMS, *sorted((ROOT / "rlhfkit/cli/demo").glob("*.yaml")), *COMMAND_FILES]:
        text = re.sub(r" *\\\n *", " ", path.read_text(encoding="utf-8"))
        if path in COMMAND_FILES:
            text = re.sub(r"(rlhfkit [^\n]+)\n +(?=--)", r"\1 ", text)  # a line of a docstring goes on in the next
        for line in re.findall(r"(?:^|[:`]) *(rlhfkit [a-z-]+ [^`\n]+)", text, re.MULTILINE):
            if "DATA" not in line and ("--" in line or len(shlex.split(line, comments=True)) > 3):
                yield re.sub(" +#.*", "", line.removesuffix("&")).strip(), path.name


WORD_PARSERS = ("report", "init", "demo", "doctor")
PARTIAL = ("score --reward_model", "fit --print_config", "export --adapter")
"""Commands in running text that name one option."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which ``run.yaml`` and ``long.yaml`` of pages are a tutorial's, ``grpo.yaml`` is the package's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rlhfkit").symlink_to(ROOT / "rlhfkit")
    for name in ("run.yaml", "long.yaml"):
        (tmp_path / name).write_text((ROOT / "rlhfkit/cli/demo/grpo_arithmetic.yaml").read_text())
    (tmp_path / "grpo.yaml").write_text(packaged("grpo").read_text())
    return tmp_path


def check_configuration(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run."""
    with pytest.raises(SystemExit) as ended:
        main([*words, "--print_config"])
    assert not ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("line", "page"), sorted(dict(shell_lines()).items()))
def test_shell_lines_are_parsed_by_the_command_line(
    line: str, page: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, command, *words = shlex.split(line, comments=True)
    if f"{command} {words[0]}" in PARTIAL:
        assert page != "README.md"
    elif command in FUNCTION_COMMANDS:
        function = resolve(FUNCTION_COMMANDS[command][1].replace(":", "."))
        parser = capture_parser(lambda: auto_cli(function, args=words))
        parser.exit_on_error = False
        parser.parse_args(words)
    elif command in WORD_PARSERS:
        resolve(f"rlhfkit.cli.{command}.{command}_parser")().parse_args(words)
    elif command == "estimate":
        check_configuration(["fit", *estimate_parser().parse_known_args(words)[1]], capsys)
    else:
        check_configuration([command, *words], capsys)


@every_page
def test_shell_and_configurations_are_well_formed(page: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    for block in blocks(page, "yaml"):
        if {*yaml.safe_load(block)} <= {"model", "data", "trainer"}:  # of a run; others are of other programs
            (place / "block.yaml").write_text(block)
            check_configuration(["fit", "--config", "grpo.yaml", "--config", "block.yaml"], capsys)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docker").glob("*"))], ids=lambda page: page.name)
def test_targets_of_make_dotted_names_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)} <= {*targets}
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


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_has_a_page_for_each_name(tmp_path: Path) -> None:
    """Strict: a link or an anchor that leads nowhere, or a page that no menu has, ends the build."""
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    named = {page.stem for page in (tmp_path / "reference").rglob("*.html")}
    assert set(rlhfkit.__all__) - named == {"__version__"} & set(rlhfkit.__all__)
    described = (tmp_path / "reference" / "modules" / "GRPOModule.html").read_text(encoding="utf-8")
    assert ":class:" not in described  # a link
    assert "kl_coef" in described
    assert "OnPolicyModule.html" in described  # where further arguments are
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    tags = [tag.partition(">")[0] for page in pages for tag in page.split("<script")[1:]]
    assert not [tag for tag in tags if 'src="http' in tag]  # nothing is asked of another host
