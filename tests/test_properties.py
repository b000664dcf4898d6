"""What must hold of every configuration that can be written down: a model that works, or one readable error."""

from hypothesis import Phase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from random_models import try_one


@settings(max_examples=200, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 2**31))
def test_a_configuration_makes_a_model_that_works_or_one_readable_error(seed: int) -> None:
    outcome, what = try_one(seed)
    assert outcome != "failed", what
