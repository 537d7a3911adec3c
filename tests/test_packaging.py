"""Packaging: the wheel, the editable tree, the pinned versions."""

import json
import os
import re
import shutil
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import attnzoo
from tests import processes

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# Folders that are not installed
OTHERS = ("benchmarks", "docs", "examples", "integrations", "tests", "tools")
ODD = "sö me"  # a folder with a space and a letter outside ASCII
WHERE = "import attnzoo.hf as hf; print(hf.__name__, hf.__file__, sep=chr(10))"


def run(*command: str | Path, cwd: Path | None = None, path: Path | None = None) -> str:
    """Run a program, with ``path`` as its PYTHONPATH, and return what it prints."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONIOENCODING": "utf-8"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return processes.run(command, cwd=cwd, env=env, check=True).stdout.strip()


def python(code: str, cwd: Path, *flags: str, path: Path | None = None) -> str:
    """Run code in a new interpreter and return what it prints."""
    return run(sys.executable, *flags, "-c", code, cwd=cwd, path=path)


def package_files() -> set[str]:
    """Return the names of the files that the wheel must contain: sources, templates, assets."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attnzoo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name[0] != "."
    }


def copy_tree(copy: Path) -> None:
    """Copy what an installation reads, so that no build leaves files in the tree or finds some."""
    copy.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    copy_folder("attnzoo", copy)


def copy_folder(name: str, copy: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / name, copy / name, ignore=ignored)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel that is built from a copy of the tree."""
    target = tmp_path_factory.mktemp("wheel")
    copy = target / "tree"
    copy_tree(copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--wheel-dir", target, copy)
    (wheel,) = target.glob("*.whl")
    return wheel


def test_every_folder_with_code_is_a_package():
    for folder in {path.parent for path in (ROOT / "attnzoo").rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"


def test_wheel_holds_everything_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    missing = package_files() - names
    assert not missing
    assert {name.split("/")[0] for name in names} == {"attnzoo", entry_points.split("/")[0]}
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any(name.endswith((".pyc", ".pyo")) for name in names)
    for name, target in PROJECT["project"]["scripts"].items():
        assert f"{name} = {target}" in scripts.splitlines()


def test_wheel_is_small(wheel):
    """Of it, 4.5 MB are the embedded model, 0.7 MB the text to evaluate it on."""
    assert wheel.stat().st_size <= 6.5e6


def test_versions_agree(wheel):
    """The version stands in ``attnzoo/__init__.py``; CITATION.cff repeats it."""
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    (cited,) = re.findall(r"^version: (.+)$", citation, re.M)
    assert wheel.name.startswith(f"attnzoo-{attnzoo.__version__}-")
    assert attnzoo.__version__ == cited
    (released,) = re.findall(r'^date-released: "(.+)"$', citation, re.M)
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\n## {cited} ({released})\n" in changelog


def test_wheel_imports(wheel, tmp_path):
    site = tmp_path / ODD / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    name, file = python(WHERE, tmp_path, path=site).splitlines()
    assert name == "attnzoo.hf"
    assert Path(file) == site / "attnzoo" / "hf" / "__init__.py"


def test_editable_tree_imports(tmp_path):
    try:
        origin = json.loads(distribution("attnzoo").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        pytest.skip("attnzoo is not installed, so there is no editable install to test")
    if not origin.get("dir_info", {}).get("editable"):
        pytest.skip("attnzoo is installed from a wheel, so there is no editable install to test")
    name, file = python(WHERE, tmp_path).splitlines()
    assert name == "attnzoo.hf"
    assert Path(file).resolve() == ROOT / "attnzoo" / "hf" / "__init__.py"


@pytest.fixture(scope="module")
def clone_with_environment(tmp_path_factory):
    """The folder of a clone called attnzoo, and a Python where it is installed as editable."""
    folder = tmp_path_factory.mktemp("editable") / ODD
    copy_tree(folder / "attnzoo")
    for name in OTHERS:
        copy_folder(name, folder / "attnzoo")
    venv.create(folder / "venv", with_pip=False)
    interpreter = folder / "venv" / "bin" / "python"
    site = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(site, "libraries.pth").write_text(sysconfig.get_path("purelib"), "utf-8")  # pip, einops
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--editable", folder / "attnzoo")
    return folder, interpreter


@pytest.mark.parametrize("beside", [True, False], ids=["beside the clone", "elsewhere"])
def test_editable_install_is_not_shadowed_by_its_clone(clone_with_environment, tmp_path, beside):
    """A notebook beside the clone has the clone's folder, which is no package, on its path."""
    folder, interpreter = clone_with_environment
    code = f"{WHERE}; import attnzoo; print('swap' in dir(attnzoo), attnzoo.__file__, sep=chr(10))"
    found = run(interpreter, "-c", code, cwd=folder if beside else tmp_path).splitlines()
    name, hf, has_swap, file = found
    assert (name, has_swap) == ("attnzoo.hf", "True")
    assert Path(file) == folder / "attnzoo" / "attnzoo" / "__init__.py"
    assert Path(hf) == folder / "attnzoo" / "attnzoo" / "hf" / "__init__.py"


def test_bare_tree_imports():
    """Without an installation, run from the root: libraries are found, but no editable install."""
    path = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})"
    code = f"{path}; import attnzoo.hf as hf; print(hf.__name__)"
    assert python(code, ROOT, "-S") == "attnzoo.hf"


def test_new_versions_of_python_are_not_refused():
    versions = SpecifierSet(PROJECT["project"]["requires-python"])
    assert not versions.contains("3.10")
    assert all(versions.contains(f"3.{minor}.9") for minor in range(11, 30))
    (condition,) = re.findall(r"sys\.exit\((.*)\)'", (ROOT / "Makefile").read_text("utf-8"))[:1]
    assert eval(condition, {"sys": SimpleNamespace(version_info=(3, 10, 14))})  # refused
    for minor in range(11, 30):
        assert not eval(condition, {"sys": SimpleNamespace(version_info=(3, minor, 0))})


@pytest.mark.parametrize("name", OTHERS)
def test_editable_install_hides_no_folder_of_its_user(clone_with_environment, tmp_path, name):
    """The clone's root is on the path, and packages in it would hide folders without __init__."""
    _, interpreter = clone_with_environment
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.py").write_text("")
    run(interpreter, "-c", f"import {name}.mine", cwd=tmp_path)


def requirements() -> list[Requirement]:
    """Return every direct dependency, those of the extras included."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    """Return name and version by line of constraints.txt, which must not contain other lines."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert match, f"{line!r} is not a plain name==version"
            assert canonicalize_name(match[1]) not in found, f"{match[1]} is pinned twice"
            found[canonicalize_name(match[1])] = match[2]
    return found


def test_every_dependency_is_pinned_within_its_range():
    pinned = pins()
    for requirement in requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} excludes the pin {version}"


def test_what_a_gpu_build_of_torch_brings_is_not_pinned():
    free = ("triton", "nvidia-", "cuda-")
    assert not [name for name in pins() if name.startswith(free)]
