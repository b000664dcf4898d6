"""What all tests of clients share: a client that is not installed skips its rows."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version

import pytest


@pytest.fixture(autouse=True)
def client_at_hand(request: pytest.FixtureRequest) -> None:
    """Skip a test whose row names a client, `row(client, asked, package=client)`, that is not installed."""
    mark = request.node.get_closest_marker("row")
    if mark is not None:
        package = mark.kwargs.get("package", mark.args[0])
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"not at hand: {package}")
