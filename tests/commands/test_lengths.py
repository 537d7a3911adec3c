import pytest

from attnzoo.commands.compare import parse_lengths
from attnzoo.errors import SpecError
from attnzoo.report.table import format_length


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1k..8k", [1024, 2048, 4096, 8192]),
        ("512", [512]),
        ("2k, 300,1K", [300, 1024, 2048]),
        ("100..500", [100, 200, 400]),
        ("1k..1k", [1024]),
        ("1m", [2**20]),
    ],
)
def test_read(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "many", "1k..", "..4k", "0", "-1", "1.5k", "4k..1k", "1k;2k", "99m"]
)
def test_refused(text):
    with pytest.raises(SpecError, match="ength"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("length", "text"), [(64, "64"), (1024, "1k"), (1536, "1.5k"), (65536, "64k"), (2**20, "1M")]
)
def test_written(length, text):
    assert format_length(length) == text
