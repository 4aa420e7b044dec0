"""The Chromium of the system, for tests in a real browser."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")  # its event loop would be in the way of other tests
def browser() -> Iterator["Browser"]:
    """Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        missing("no chromium here")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright here: pip install playwright")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
