"""The example plugin: installed in a folder of its own, it works like a built-in backend."""

import shutil
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "cosine_attention"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment whose Python finds the installed example; nothing is downloaded."""
    source = tmp_path_factory.mktemp("source") / "example"
    shutil.copytree(EXAMPLE, source)  # a build leaves files beside its sources
    place = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(place), str(source)]
    processes.run(command, check=True)
    return place


@pytest.fixture
def run(installed, fresh_python):
    """A function that runs a program in this environment and returns what it prints."""

    def run(program, *arguments):
        done = fresh_python(program, *arguments, cwd=ROOT, path=(installed, ROOT))
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.exhaustive
def test_list_and_compare(run, tmp_path):
    command = "from attnzoo.cli import main; main()"
    assert '"cosine"' in run(command, "list", "--json")
    out = tmp_path / "out"
    printed = run(
        command,
        *("compare", "--attention", "flash,cosine", "--lengths", "64,128"),
        *("--level", "op", "--no-quality", "--threads", 1, "--output-dir", out),
    )
    assert "cosine" in printed
    rows = (out / "results.jsonl").read_text().splitlines()
    assert sum('"attention": "cosine"' in row and '"status": "ok"' in row for row in rows) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_conformance(run):
    program = "import sys; import pytest; sys.exit(pytest.main())"
    assert " passed" in run(program, "-q", "-p", "no:cacheprovider", EXAMPLE / "tests")


@pytest.mark.slow
def test_comparison(run):
    code = (
        "from attnzoo.compare.cases import default_specs; "
        "from attnzoo.evaluation.models import spec_label; "
        "print(*map(spec_label, default_specs(None)))"
    )
    assert "cosine" in run(code).split()
