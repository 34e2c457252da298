"""One browser for all tests of the page, and tabs in it that tolerate no error."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.browser.pictures import told, training
from tests.browser.serving import Served, Shown, served
from torchelastic.events.analysis.view import JobView

#: Milliseconds: of a busy machine, and less than pytest gives a test.
PATIENCE = 90_000


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Not of the whole session: while it is open an event loop runs in this thread."""
    from playwright.sync_api import sync_playwright

    # As root, in a container, chromium has no sandbox to make.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=[*flags, "--disable-dev-shm-usage", "--disable-gpu"],
            timeout=PATIENCE,
        )
        yield browser
        browser.close()


class Tab:
    """A page that is open, and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.troubles: list[str] = []
        #: The server was not there, which the browser says for every attempt to reach it.
        self.refused: list[str] = []
        self.may_lose_server = False
        page.set_default_timeout(PATIENCE)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("dialog", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            kind = self.refused if "net::ERR_" in message.text else self.troubles
            kind.append(f"{message.type}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def wear(
        self,
        *,
        width: int = 1240,
        height: int = 900,
        scheme: str = "light",
        motion: str = "reduce",
    ) -> None:
        """The reader's screen. Drawing animations takes most of the CPU time."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=scheme, reduced_motion=motion)

    def begin(self) -> None:
        self.wear()
        self.troubles.clear()
        self.refused.clear()
        self.may_lose_server = False

    def check(self) -> None:
        assert self.troubles == []
        assert self.may_lose_server or self.refused == []

    def go(self, url: str) -> None:
        """Open it, and wait until a picture is drawn."""
        self.page.goto(url)
        self.page.wait_for_selector("#log")

    def leave(self) -> None:
        self.page.goto("about:blank")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, selector: str, text: str) -> None:
        """Until an element has this in its text."""
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
            arg=[selector, text],
        )


@contextmanager
def new_tab(browser: Any, **options: Any) -> Iterator[Tab]:
    context = browser.new_context(timezone_id="UTC", **options)
    try:
        yield Tab(context.new_page())
    finally:
        context.close()


@pytest.fixture(scope="package")
def one_tab(browser: Any) -> Iterator[Tab]:
    with new_tab(browser) as opened:
        yield opened


@pytest.fixture
def tab(one_tab: Tab) -> Iterator[Tab]:
    """The same for all tests, for it takes a second to make; empty again after each."""
    one_tab.begin()
    yield one_tab
    one_tab.leave()
    one_tab.check()


Show = Callable[..., tuple[Served, Shown]]


@pytest.fixture
def show(tab: Tab) -> Iterator[Show]:
    """Opens the page with a picture: `show(view, live=True)`."""
    with ExitStack() as stack:

        def opened(
            view: JobView | None = None, *, live: bool = True, text: str = "told"
        ) -> tuple[Served, Shown]:
            picture = told(training() if view is None else view, live=live, text=text)
            server, shown = stack.enter_context(served(picture))
            tab.go(server.url)
            return server, shown

        yield opened
        tab.leave()  # before the server goes


@pytest.fixture(scope="module")
def modules(one_tab: Tab) -> Iterator[Callable[..., Any]]:
    """Calls a function of one of the page's modules: `modules("words", "seconds", 0.18)`."""

    def call(module: str, name: str, *arguments: Any) -> Any:
        return one_tab.page.evaluate(
            "([module, name, given]) =>"
            " import(`/static/${module}.js`).then((loaded) => loaded[name](...given))",
            [module, name, list(arguments)],
        )

    with served(told(training())) as (server, _):
        one_tab.begin()
        one_tab.go(server.url)
        yield call
        one_tab.leave()
        one_tab.check()


def address(said: str) -> str:
    """Where the page is, in what a command says; empty: it has not said it."""
    found = re.search(r"http://\S+", said)
    return found[0] if found else ""
