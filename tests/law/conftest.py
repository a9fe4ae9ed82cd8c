import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-law", action="store_true", help="every combination of drafter, rule, parameters and batch")
