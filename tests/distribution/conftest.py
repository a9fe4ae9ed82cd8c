import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cells", action="store_true", help="every combination of drafter, rule, parameters and batch"
    )
