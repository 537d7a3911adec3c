import hashlib
import sysconfig

import pytest
import torch
from transformers import ByT5Tokenizer

from attnzoo.evaluation import corpus
from attnzoo.evaluation.corpus import (
    add_repeats,
    byte_tokens,
    cut_rows,
    held_out_files,
    is_held_out,
    join,
    place_repeat,
)
from attnzoo.evaluation.rows import Rows
from tools.python_text import standard_library_files


def sha256(data):
    return hashlib.sha256(data).hexdigest()[:16]


def test_the_text_is_the_same_on_every_python(monkeypatch, tmp_path):
    """Not that of the Python that runs, whose standard library may lack idlelib, or all of it."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus.source_files.cache_clear()
    assert sha256(join(held_out_files())) == "b8b5d3aa86738eb7"
    assert held_out_files()[0].startswith(b'"""\n    ast\n')


def test_splits_share_no_file_and_leave_tests_out():
    train, held_out = (standard_library_files(held_out=h) for h in (False, True))
    assert not set(train) & set(held_out)
    assert 10 < len(held_out) < len(train)
    assert not [p for p in train + held_out if "test" in p.parts or "site-packages" in p.parts]


def test_split_depends_on_the_name_alone():
    assert is_held_out("tarfile.py") == is_held_out("tarfile.py")
    share = sum(is_held_out(f"{i}.py") for i in range(2000)) / 2000
    assert 0.03 < share < 0.07


@pytest.mark.parametrize("length", [128, 256, 512, 1024])
def test_copies_keep_their_distance(length):
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        repeat = place_repeat(length, generator)
        assert repeat.first >= 0
        assert repeat.second - (repeat.first + repeat.length) >= 96
        assert repeat.second + repeat.length <= length


def test_second_copy_equals_the_first_and_the_rest_stays():
    generator = torch.Generator().manual_seed(0)
    rows = cut_rows([torch.randint(0, 256, (5000,), generator=generator)], 6, 512, generator)
    before = rows.tokens.clone()
    for row, old, repeat in zip(rows.tokens, before, add_repeats(rows, generator), strict=True):
        first = slice(repeat.first, repeat.first + repeat.length)
        second = slice(repeat.second, repeat.second + repeat.length)
        assert torch.equal(row[second], row[first])
        old[second] = row[second]
        assert torch.equal(row, old)


def test_share_leaves_rows_alone():
    generator = torch.Generator().manual_seed(0)
    repeats = add_repeats(Rows.of_documents(torch.zeros(200, 512)), generator, share=0.5)
    assert 60 < sum(r is None for r in repeats) < 140


def test_a_short_text_is_refused():
    with pytest.raises(ValueError, match=r"has 5 tokens, but one row needs 10"):
        cut_rows([torch.zeros(5)], 1, 10, torch.Generator())


def test_training_tokens_are_the_tokenizers_own():
    text = "def f(x):\n    return 'é€'\n"
    own = ByT5Tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert byte_tokens(text.encode()).tolist() == own
