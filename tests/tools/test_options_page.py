from pathlib import Path

from tools import options_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date(fresh_python):
    """If not, run: python -m tools.options_page.

    In a process of its own: the page lists every registered map, and other tests register some.
    """
    shown = fresh_python("from tools.options_page import page; print(page(), end='')", cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert options_page.PAGE.read_text("utf-8") == shown.stdout
