"""Serve models that attnzoo has swapped with vLLM: ``vllm serve FOLDER``, or ``LLM(FOLDER)``.

vLLM calls :func:`register` in each of its processes. Nothing else is called by users.
"""

from __future__ import annotations


def register() -> None:
    """Make vLLM's registry and its configs know swapped models; a second call changes nothing."""
    from attnzoo_vllm.config import register_models, wrap_get_config

    register_models()
    wrap_get_config()
