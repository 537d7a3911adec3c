"""transformers' own model tests under every backend, in processes of their own.

The tests come from the source distribution of the installed version, which has those that all
models share: building, saving, loading, gradients, hidden states, attention weights, embeddings,
and what models do under sdpa and in 16 bits.
"""

import os
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnzoo.registry import BUILTIN
from tests.processes import run

pytest.importorskip("parameterized", reason="parameterized is not installed; extra 'dev'")
pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
# The tests import these two mixins, which are not in the source distribution
MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
}


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """Return a folder with the package ``suite``, transformers' own tests."""
    folder = tmp_path_factory.mktemp("transformers")
    name = f"transformers=={version('transformers')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    source_only = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", f"--dest={folder}"]
    run([*pip, *source_only, name], check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (tests,) = folder.glob("transformers-*/tests")
    tests.rename(folder / "suite")
    for path, content in MISSING.items():
        path = folder / "suite" / path
        path.parent.mkdir()
        path.write_text(content, "utf-8")
    return folder


@pytest.mark.parametrize(
    ("backend", "exhaustive"),
    [
        ("softmax", False),
        *(pytest.param(name, True, marks=pytest.mark.exhaustive) for name in BUILTIN),
    ],
)
def test_own_tests_of_transformers(suite, backend, exhaustive, tmp_path):
    tests, report = HERE / "own_model_tests.py", tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--junitxml={report}"]
    options += [] if exhaustive else ["-k", "LlamaTest or T5Test"]
    env = os.environ | {"BACKEND": backend, "EXHAUSTIVE": str(int(exhaustive))}
    env["PYTHONPATH"] = f"{suite}:{HERE.parents[1]}"
    done = run(
        [sys.executable, "-m", "pytest", *options, tests], cwd=tmp_path, env=env, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = ElementTree.parse(report).findall(".//testcase")
    passed = [case for case in cases if case.find("skipped") is None]
    assert len(passed) >= (500 if exhaustive else 200)
