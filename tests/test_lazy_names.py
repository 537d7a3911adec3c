"""Names that a package imports on first use."""

import sys

import pytest

STUB = """# a comment
from fractions import Fraction as Fraction
from decimal import (
    Decimal as Decimal,
)
from zoo_lazy import part as part

__version__: str
"""
CODE = """from attnzoo.lazy_names import lazy_names
__getattr__, __dir__, __all__ = lazy_names(__name__)
"""


def test_names_come_from_the_stub_on_first_use(tmp_path, monkeypatch):
    folder = tmp_path / "zoo_lazy"
    folder.mkdir()
    (folder / "__init__.pyi").write_text(STUB)
    (folder / "__init__.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "part.py").write_text("")
    import zoo_lazy

    monkeypatch.setitem(sys.modules, "zoo_lazy", zoo_lazy)
    assert zoo_lazy.__all__ == ["Decimal", "Fraction", "part"]
    assert {"Decimal", "Fraction", "__all__"} <= set(dir(zoo_lazy))
    assert "Decimal" not in vars(zoo_lazy)
    assert zoo_lazy.Decimal.__module__ == "decimal"
    assert "Decimal" in vars(zoo_lazy)
    assert zoo_lazy.part.__name__ == "zoo_lazy.part"  # once imported, an attribute
    with pytest.raises(AttributeError, match="module 'zoo_lazy' has no attribute 'Float'"):
        _ = zoo_lazy.Float
