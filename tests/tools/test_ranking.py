"""Configs are selected by cost."""

from attnzoo.ops.linear.triton.configs import Config
from tools.triton_configs.ranking import cheapest_configs

WIDE, NARROW = Config(64, 8, 2, 128), Config(64, 4, 2, 64)
COSTS = {WIDE: {"out": 10.0, "dq": 30.0, "dk": 60.0}, NARROW: {"out": 20.0, "dq": 40.0, "dk": 40.0}}


def test_each_kernel_has_its_cheapest_config():
    assert cheapest_configs(COSTS, "vector") == {"out": WIDE, "dq": WIDE, "dk": NARROW}


def test_dq_and_dk_have_equal_tiles_with_scalar_decay():
    assert cheapest_configs(COSTS, "scalar") == {"out": WIDE, "dq": NARROW, "dk": NARROW}


def test_a_candidate_that_does_not_run_is_not_selected():
    costs = {WIDE: {"out": 1.0}, NARROW: {"out": 2.0, "dq": 3.0, "dk": 4.0}}
    selected = cheapest_configs(costs, "scalar")
    assert selected == {"out": WIDE, "dq": NARROW, "dk": NARROW}
