"""The oldest and the newest supported transformers: ``nox`` runs the integration tests on both.

The virtual environment of the Makefile holds the newest. An older one goes into a folder of its own
that stands before it on the path, with what it needs in other versions; torch is installed once.
"""

import os
import shutil
from pathlib import Path

import nox

NEWEST = "5.23.0"
OLDER = {  # transformers, and what it needs that the newest does not
    "5.17.0": (
        "huggingface_hub==1.33.0",
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "certifi==2026.10.18",
    ),
}
TESTS = (
    "tests/integrations",
    "tests/families",
    "tests/tools/family_sweep",
    "tests/test_spec.py",
    "tests/test_minilm.py",
)

nox.options.default_venv_backend = "none"


@nox.session
@nox.parametrize("transformers", [nox.param(v, id=v) for v in (*OLDER, NEWEST)])
def integrations(session: nox.Session, transformers: str) -> None:
    """Run the tests of all that knows transformers; arguments after ``--`` go to pytest."""
    env = {"OMP_NUM_THREADS": "1"}
    if transformers in OLDER:
        env["PYTHONPATH"] = str(_older(session, transformers))
    check = f"import transformers as t; assert t.__version__ == {transformers!r}, t.__version__"
    session.run(".venv/bin/python", "-c", check, env=env, external=True)
    quick = ("-m", "not slow and not exhaustive") if transformers in OLDER else ()
    given = session.posargs or ("-n", "2", "--dist", "worksteal", *quick, *TESTS)
    session.run(".venv/bin/python", "-m", "pytest", *given, env=env, external=True)


@nox.session
def sweep(session: nox.Session) -> None:
    """Sweep the model families of older versions (newest: `python -m tools.family_sweep`)."""
    for transformers in OLDER:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_older(session, transformers))}
        session.run(".venv/bin/python", "-m", "tools.family_sweep", env=env, external=True)


def _older(session: nox.Session, transformers: str) -> Path:
    """Return the folder with an older transformers, made if it is not there yet."""
    folder = Path(".nox", f"transformers-{transformers}").resolve()
    wanted = [f"transformers=={transformers}", *OLDER[transformers]]
    done = folder / ".done"
    if not done.is_file() or done.read_text("utf-8").split() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        pip = (".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps")
        env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
        session.run(*pip, "--target", str(folder), *wanted, env=env, external=True)
        done.write_text("\n".join(wanted), "utf-8")
    return folder
