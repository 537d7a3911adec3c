"""Every public op under one name; an op's module is imported when the op is first used.

An op is a pure function on tensors that computes one mechanism. It lives in
``attnzoo/ops/<algorithm>/api.py``; ``__init__.pyi`` lists the ops.
"""

from attnzoo.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
