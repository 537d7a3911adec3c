import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_backend_is_in_the_table():
    from attnzoo.registry import available_backends

    for name in available_backends():
        assert re.search(rf"^\| `{name}`", README, re.MULTILINE), name


def test_the_essentials_come_first():
    top = "\n".join(README.splitlines()[:60])
    for essential in ("make demo", "make test", "```python", "| `linear`", "!["):
        assert essential in top
