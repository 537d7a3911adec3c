"""The smallest kernel, compiled once for all tests of this folder."""

import pytest

from attnzoo.ops.lsh.cpu.lsh import PIVOTS
from attnzoo.runtime import cpp
from attnzoo.runtime.cache_folder import CACHE


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compile the kernel, and return its file."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder))
        try:
            cpp.load.__wrapped__(PIVOTS)
        except cpp.BuildError as error:
            pytest.skip(str(error))
    return next(folder.iterdir())
