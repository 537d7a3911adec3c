"""The versions of vLLM that the tests of this package run with."""

from __future__ import annotations

from packaging.version import Version

OLDEST, NEWEST = "0.32", "0.32"  # releases MAJOR.MINOR; both ends are tested


def refuse_untested() -> None:
    """Raise ``ValueError`` if the tests do not run with the installed version of vLLM."""
    import vllm

    installed = Version(vllm.__version__)
    if Version(OLDEST) <= Version(f"{installed.major}.{installed.minor}") <= Version(NEWEST):
        return
    raise ValueError(
        f"attnzoo-vllm is tested with vLLM {OLDEST} to {NEWEST}, and {vllm.__version__} is "
        f"installed. Install one of those: pip install 'vllm=={NEWEST}.*'"
    )
