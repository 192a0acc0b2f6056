"""A headless Chromium for tests of the playground. Without Chromium, these tests are skipped with the reason."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
FLAGS += ("--window-size=1280,860",)  # wide enough for the page's two columns
WAIT = 30.0  # seconds at most, on a busy machine


class Browser:
    """One tab. Elements are named by their id."""

    def __init__(self, driver):
        self.driver = driver
        self.run: Callable[..., Any] = driver.execute_script

    def __getitem__(self, id):
        return self.driver.find_element("id", id)

    def all(self, selector):
        """Elements by CSS selector."""
        found = self.driver.find_elements("css selector", selector)
        return found

    def until(self, condition):
        """Wait until the condition is true; returns its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT, 0.02).until(lambda _: condition())

    def press(self, *keys):
        """Send keys to the element that has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    @property
    def focused(self):
        """The id of the element with the focus."""
        return str(self.run("return document.activeElement.id"))

    def complaints(self):
        """Errors in the browser's console since the last call."""
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]


@contextmanager
def chromium():
    """A browser; skips the test if Chromium, its chromedriver or selenium is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed (it is in the extra 'dev')")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_binary = shutil.which("chromedriver")
    if binary is None or driver_binary is None:
        pytest.skip("no Chromium with its chromedriver here (Debian: chromium, chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Both paths are given, so selenium neither searches for a driver nor downloads one.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_binary))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
