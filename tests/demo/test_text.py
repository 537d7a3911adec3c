import pytest

from attnzoo.demo.text import embedded_model_path, judge_on, longest_context
from attnzoo.errors import SpecError


def test_rows_and_repeats_of_the_embedded_model():
    judged = judge_on(embedded_model_path(), None, rows=4, row_length=256, stream=300)
    assert judged.plain.shape == judged.twice.shape == (4, 256)
    assert judged.bytes_per_token == 1.0  # one token per byte
    assert len(judged.stream) == 300
    for row, repeat in zip(judged.twice, judged.repeats, strict=True):
        first = row[repeat.first : repeat.first + repeat.length]
        assert first.equal(row[repeat.second : repeat.second + repeat.length])


def test_missing_text_is_refused(tmp_path):
    with pytest.raises(SpecError, match="There is no text file"):
        judge_on(embedded_model_path(), tmp_path / "none.txt", rows=1, row_length=8, stream=8)


def test_rotary_models_have_no_longest_context():
    assert longest_context(embedded_model_path()) is None


def test_learned_positions_end(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_positions=64).save_pretrained(tmp_path)
    assert longest_context(tmp_path) == 64
