import json

import pytest
import torch

import attnzoo
from attnzoo.backends.block_sparse import BlockSparseConfig
from attnzoo.compare.maps import (
    AttentionMaps,
    difference,
    distance_edges,
    entropy,
    make_maps,
    mass_by_distance,
    summary,
    write_maps,
)
from attnzoo.compare.selected_blocks import FIRST, NOT_ATTENDED, SELECTED, WINDOW, selected_blocks
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.spec import AttentionSpec


def test_entropy_and_difference():
    alike, sharp = torch.full((1, 8), 1 / 8), torch.eye(8)[:1]
    assert float(entropy(alike)) == pytest.approx(3.0, abs=1e-5)
    assert float(entropy(sharp)) == pytest.approx(0.0, abs=1e-5)
    assert float(difference(alike, sharp)) == pytest.approx(7 / 8)
    assert float(difference(alike, alike)) == 0


def test_mass_by_distance():
    """Each of nine queries puts half on itself and half on the key three before it."""
    weights = torch.eye(9) / 2
    weights[range(3, 9), range(6)] = 0.5
    mass = mass_by_distance(weights)
    edges = distance_edges(9)
    assert edges == [0, 1, 3, 7, 15]
    expected = torch.tensor([4.5, 0, 3.0, 0, 0]) / 7.5
    torch.testing.assert_close(mass, expected)


@pytest.fixture(scope="module")
def found():
    return {
        name: make_maps(
            "embedded", AttentionSpec(name, **options), text=None, layer=2, head=3, tokens=96
        )
        for name, options in (("flash", {}), ("longformer", {"window": 16}), ("linear", {}))
    }


def test_the_requested_head_is_first_and_all_heads_are_present(found):
    for maps in found.values():
        assert [one.head for one in maps] == [3, 0, 1, 2]
        assert {one.layer for one in maps} == {2}


def test_exact_attention_differs_from_itself_by_rounding(found):
    for maps in found["flash"]:
        torch.testing.assert_close(maps.exact, maps.approximate, rtol=0, atol=1e-5)
        assert maps.facts()["difference"] == 0
        assert maps.facts()["same_favourite"] == 1


def test_both_maps_are_of_the_same_queries_and_keys(found):
    """A window's map is the exact one, masked and normalised again."""
    near = torch.ones(96, 96, dtype=torch.bool).tril().triu(-15)
    for maps in found["longformer"]:
        cut = maps.exact * near
        expected = cut / cut.sum(1, keepdim=True)
        torch.testing.assert_close(maps.approximate, expected, rtol=0, atol=1e-5)
        assert sum(maps.facts()["mass_approximate"][5:]) == 0


def test_rows_of_all_maps_are_weights(found):
    for maps in (one for group in found.values() for one in group):
        torch.testing.assert_close(maps.approximate.sum(1), torch.ones(96), rtol=0, atol=1e-3)
        assert maps.exact.triu(1).abs().max() == 0


def test_written_files(found, tmp_path):
    page = write_maps(tmp_path, found["linear"])
    facts = json.loads((tmp_path / "maps.json").read_text())
    assert facts["attnzoo"] == attnzoo.__version__
    assert len(facts["heads"]) == 4
    assert page.read_text().count("<svg") == 5
    pictures = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert pictures == {"exact", "approximate", "difference", "entropy", "distance"}
    assert "linear moves" in summary(found["linear"][0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": 4}, "one of 0 to 3"),
        ({"head": 4}, "0 to 3"),
        ({"tokens": 1}, "2 or more"),
        ({"model": "nowhere", "text": "x"}, "no saved model"),
        ({"text": "nowhere.txt"}, "cannot be read"),
    ],
)
def test_mistakes(given, message, tmp_path):
    options = {"model": "embedded", "text": None, "layer": 0, "head": 0, "tokens": 8} | given
    if options["text"]:
        options["text"] = tmp_path / options["text"]
    model = options.pop("model")
    with pytest.raises(SpecError, match=message):
        make_maps(model, AttentionSpec("linear"), **options)


def test_a_folder_that_cannot_be_written(found, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AttnzooError, match="cannot be written"):
        write_maps(tmp_path / "file" / "out", found["flash"])


def test_negative_weights_count_by_size():
    maps = AttentionMaps(
        exact=torch.eye(4),
        approximate=torch.eye(4) * 2 - 0.25,
        tokens=list("abcd"),
        attention="odd",
        layer=0,
        head=0,
    )
    facts = maps.facts()
    assert all(share >= 0 for share in facts["mass_approximate"])
    assert sum(facts["mass_approximate"]) == pytest.approx(1, abs=1e-3)


def test_the_selected_blocks_of_a_head():
    """The picture shows the blocks that the op selected; shares are sums of softmax's weights."""
    options = {"window": 8, "num_sinks": 2, "top_k": 3, "block_size": 4}
    spec = AttentionSpec("block_sparse", **options)
    found = make_maps("embedded", spec, text=None, layer=2, head=1, tokens=64)
    for maps in found:
        blocks, t = maps.blocks, 63
        assert blocks.kinds.shape == (64, 16)
        assert blocks.kinds[t].eq(SELECTED).sum() == 3
        assert blocks.kinds[t, 14:].eq(WINDOW).all()
        assert blocks.kinds[t, 0] in (FIRST, SELECTED)
        assert blocks.kinds[0].tolist() == [WINDOW] + [NOT_ATTENDED] * 15
        attended = (maps.exact * (maps.approximate > 0)).sum(1)
        torch.testing.assert_close(blocks.covered, attended, rtol=0, atol=1e-5)
        assert (blocks.best >= blocks.covered - 1e-6).all()
    assert [plot.name for plot in found[0].blocks.plots()] == ["blocks", "covered"]
    facts = found[0].facts()
    assert 0 < facts["weight_attended"] <= facts["weight_of_best_blocks"] <= 1
    assert "selects 2." in summary(found[0])


def test_the_best_selection_is_counted_by_hand():
    """Window of 1 in blocks of 2, one selected block; the last of 6 queries selected block 0."""
    config = BlockSparseConfig(window=1, num_sinks=0, top_k=1, block_size=2)
    exact = torch.eye(6)
    exact[5] = torch.tensor([0.1, 0.1, 0.2, 0.3, 0.2, 0.1])
    approximate = torch.eye(6)
    approximate[5] = torch.tensor([0.2, 0.2, 0.0, 0.0, 0.4, 0.2])
    blocks = selected_blocks(exact, approximate, config, causal=True)
    assert blocks.kinds[5].tolist() == [SELECTED, NOT_ATTENDED, WINDOW]
    assert float(blocks.covered[5]) == pytest.approx(0.5)
    assert float(blocks.best[5]) == pytest.approx(0.8)
