"""The pages as a site: it is built without a dead link, loads nothing from elsewhere, and works in a browser.

It needs ``pip install -e '.[docs]'``, and for the browser ``chromium``: without them these tests are skipped.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.clients  # so that the job with the extra runs them


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_it_and_loads_nothing_from_elsewhere(site: Path):
    docs = ROOT / "flatshard" / "docs"
    pages = {path.relative_to(docs).with_suffix(".html") for path in docs.rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]*)", path.read_text())
        assert loaded == [], path


class Browser:
    """A headless chromium that is told by a pipe what to do, in the messages of its developer tools."""

    def __init__(self, folder: Path) -> None:
        (theirs, to_it), (from_it, replies) = os.pipe(), os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        command = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{replies}', "bash", str(BROWSER), *options]
        self.process = subprocess.Popen(command, pass_fds=(theirs, replies), stderr=subprocess.DEVNULL)
        os.close(theirs), os.close(replies)
        self.to_it, self.from_it = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb")
        self.asked, self.session = 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.asked += 1
        message = {"id": self.asked, "method": method, "params": arguments} | self.session
        self.to_it.write(json.dumps(message).encode() + b"\0")
        while True:  # events come between
            reply = json.loads(b"".join(iter(functools.partial(self.from_it.read, 1), b"\0")))
            if reply.get("id") == self.asked:
                return reply["result"]

    def wait_for(self, expression: str, seconds: float = 30) -> Any:
        """Return the value of the expression as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {expression}")


@pytest.fixture
def browser(site: Path, tmp_path: Path) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("not installed: chromium")
    made = Browser(tmp_path)
    yield made
    made.process.terminate()
    made.process.wait()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_search_finds_a_function(browser: Browser, address: str):
    browser.call("Page.navigate", url=f"{address}/index.html?q=fully_shard")
    found = browser.wait_for("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')")
    assert "/api/flatshard.html" in found.split()[0]
    assert re.search(r"/api/flatshard\.html\S*#fully_shard\b", found)


@pytest.mark.parametrize("page", ["start", "migration", "troubleshooting", "api/flatshard"])
def test_a_page_is_as_wide_as_a_phone(browser: Browser, address: str, page: str):
    """Only code and tables scroll to the side, each alone."""
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    browser.call("Page.navigate", url=f"{address}/{page}.html")
    browser.wait_for("document.readyState == 'complete' && document.querySelector('h1') != null")
    assert browser.wait_for("document.documentElement.scrollWidth") == 390
