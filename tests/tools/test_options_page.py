import subprocess
import sys

from tools import options_page


def test_the_page_is_up_to_date():
    """If not, run: python -m tools.options_page.

    In a process of its own: the page lists every registered map, and other tests register some.
    """
    command = "from tools.options_page import page; print(page(), end='')"
    shown = subprocess.check_output([sys.executable, "-c", command], encoding="utf-8")
    assert options_page.PAGE.read_text("utf-8") == shown
