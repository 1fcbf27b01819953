"""The marker of tests that compare times keeps them out of the suite whose tests run beside each other."""

import pytest


@pytest.mark.alone
def test_what_runs_alone_is_slow(request):
    """Were it not, `make test` would run this one, too."""
    assert request.node.get_closest_marker("slow")
