"""A converted random model computes what the masked model does, or it is refused in a sentence."""

import pytest
from hypothesis import HealthCheck, given, settings
from random_models import Drawn, Outcome, check_conversion, models

COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(COMMON, max_examples=25, derandomize=True)
@given(models())
def test_random_models(drawn: Drawn) -> None:
    check_conversion(drawn, Outcome())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(COMMON, max_examples=2000, print_blob=True)
@given(models())
def test_many_random_models(drawn: Drawn) -> None:
    check_conversion(drawn, OUTCOME)


OUTCOME = Outcome()


@pytest.mark.slow
def test_most_random_models_are_converted() -> None:
    if not OUTCOME.converted:
        pytest.skip("runs after the many random models")
    refused = sum(OUTCOME.refused.values())
    assert OUTCOME.converted > 9 * refused, OUTCOME.refused
