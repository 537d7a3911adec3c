"""The template of a plugin: installed into a folder of its own, it is a backend like any other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "cosine_attention"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment whose Python finds the installed example; nothing is fetched."""
    source = tmp_path_factory.mktemp("source") / "example"
    shutil.copytree(EXAMPLE, source)  # a build leaves files beside what it builds
    place = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(place), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return os.environ | {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}


def run(installed, *arguments, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env=installed,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_is_listed_and_compared(installed, tmp_path):
    assert '"cosine"' in run(installed, "attnzoo", "list", "--json")
    out = tmp_path / "out"
    printed = run(
        installed,
        *("attnzoo", "compare", "--attention", "flash,cosine", "--lengths", "64,128"),
        *("--level", "op", "--no-quality", "--threads", 1, "--out", out),
    )
    assert "cosine" in printed
    rows = (out / "results.jsonl").read_text().splitlines()
    assert sum('"attention": "cosine"' in row and '"status": "ok"' in row for row in rows) == 2


@pytest.mark.slow
def test_it_keeps_the_rules(installed):
    run(installed, "pytest", "-q", "-p", "no:cacheprovider", EXAMPLE / "tests")


@pytest.mark.slow
def test_the_demo_shows_it(installed, tmp_path):
    code = (
        "from attnzoo.demo.run import default_specs; "
        "from attnzoo.evaluation.models import spec_label; "
        "print(*map(spec_label, default_specs(None)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=installed, capture_output=True, text=True, check=True
    )
    assert "cosine" in done.stdout.split()
