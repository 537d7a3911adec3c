"""The recorded sweep meets its goals."""

import pytest

from attnzoo.errors import SpecError
from attnzoo.hf.seam import TESTED
from tools.family_sweep import record

VERSIONS = record.versions()


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_silently_different(version):
    found = record.read(version)
    for name, entry in found["types"].items():
        parts = [entry.get(part, {}) for part in ("backends", "windows", "own_windows")]
        for backend, result in (x for part in parts for x in part.items()):
            assert result["outcome"] not in ("different", "failed"), (name, backend, result)
            if result["outcome"] in ("refused", "in part"):
                assert len(result["reason"]) > 20, (name, backend)
            for what, why in result.get("refused", {}).items():
                assert len(why) > 20, (name, backend, what)
        assert entry["outcome"] != "not built" or entry["reason"], name


def test_windows_of_exact_backends():
    """Of all model types that decode; most of them are not refused."""
    entries = [x["windows"] for x in record.read()["types"].values() if "windows" in x]
    assert len(entries) >= 200
    for name in ("flash window", "softmax window", "flash window sinks", "softmax window sinks"):
        equal = [x[name] for x in entries if x[name]["outcome"] == "equal"]
        assert len(equal) >= 150
        assert sum("steps, inside padding" in x["checked"] for x in equal) >= 100


def test_backends_with_a_window_in_families_with_windows():
    entries = [x["own_windows"] for x in record.read()["types"].values() if "own_windows" in x]
    assert len(entries) >= 55
    for name, least in (("flash", 45), ("longformer", 30), ("linear", 20), ("block_sparse", 20)):
        ran = [x[name] for x in entries if x[name]["outcome"] in ("equal", "in part")]
        assert len(ran) >= least
        inside = {"inside padding", "steps, inside padding, positions"}
        assert sum(inside <= {*x["checked"]} for x in ran) >= least // 2


def test_goals():
    newest = record.read()
    counts = record.counts(newest)
    assert counts["softmax"]["equal"] >= 200
    assert counts["flash"]["equal"] >= 200
    assert len(record.by_family(newest)) >= 347


def test_the_newest_record_is_of_the_newest_supported_version():
    assert VERSIONS[0].rpartition(".")[0] == TESTED["transformers"][-1].rpartition(".")[0]


def test_an_unknown_version_is_refused():
    with pytest.raises(SpecError, match=r"No sweep of transformers 4\.0"):
        record.read("4.0")
