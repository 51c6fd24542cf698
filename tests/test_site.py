"""The documentation site: it builds without a warning and without network, with a page for each public name."""

import subprocess
import sys
from pathlib import Path

import pytest

import rlhfkit

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_has_a_page_for_each_name(tmp_path: Path) -> None:
    """Strict: a link or an anchor that leads nowhere, or a page that no menu has, ends the build."""
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    named = {page.stem for page in (tmp_path / "reference").rglob("*.html")}
    assert set(rlhfkit.__all__) - named == {"__version__"} & set(rlhfkit.__all__)
    for name, argument in (("GRPOModule", "kl_coef"), ("OnPolicyModule", "clip_high")):  # where each is described
        class_page = (tmp_path / "reference" / "modules" / f"{name}.html").read_text(encoding="utf-8")
        assert ":class:" not in class_page
        assert argument in class_page
        assert "OnPolicyModule.html" in class_page
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    tags = [tag.partition(">")[0] for page in pages for tag in page.split("<script")[1:]]
    assert not [tag for tag in tags if 'src="http' in tag]  # nothing is asked of another host
