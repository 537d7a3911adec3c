import pytest

from attnzoo.errors import SpecError
from attnzoo.evaluation.models import embedded_model_path, max_positions
from attnzoo.evaluation.quality import make_eval_batch


def test_rows_and_repeats_of_the_embedded_model():
    batch = make_eval_batch(embedded_model_path(), None, rows=4, row_length=256)
    assert batch.rows.tokens.shape == batch.repeated.tokens.shape == (4, 256)
    assert batch.rows.bytes_per_token == 1.0  # one token per byte
    for row, repeat in zip(batch.repeated.tokens, batch.repeats, strict=True):
        first = row[repeat.first : repeat.first + repeat.length]
        assert first.equal(row[repeat.second : repeat.second + repeat.length])


def test_missing_text_is_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        make_eval_batch(embedded_model_path(), tmp_path / "none.txt", rows=1, row_length=8)


@pytest.mark.parametrize(("name", "text"), [("a.txt", ""), ("a.txt", " \n"), ("a.jsonl", "\n")])
def test_a_file_without_text_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match="has no text"):
        make_eval_batch(embedded_model_path(), tmp_path / name, rows=1, row_length=8)


def test_rotary_models_have_no_max_positions():
    assert max_positions(embedded_model_path()) is None


def test_learned_positions_are_limited(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_positions=64).save_pretrained(tmp_path)
    assert max_positions(tmp_path) == 64
