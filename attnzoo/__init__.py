"""Efficient attention for Hugging Face transformers: swap it by config, recover, compare.

Importing this package is fast: names are imported on first use, and each patch of transformers is
applied when the module that it patches is imported. ``__init__.pyi`` lists the names.
"""

from attnzoo.autoload import after_import
from attnzoo.hf.patches import PATCHES
from attnzoo.lazy_names import lazy_names

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_names(__name__)

after_import(PATCHES)
