"""A headless Chromium on a pipe that opens a page, asks it things and takes pictures, for the dashboard."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. A context manager; the browser and its profile are gone at the end.

    Raises:
        FileNotFoundError: there is no Chromium.
        TimeoutError: it does not answer.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        path = find()
        if path is None:
            raise FileNotFoundError(f"no Chromium here; looked for {', '.join(NAMES)}")
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._profile = tempfile.mkdtemp(prefix="browser-")
        # It reads its orders from descriptor 3 and answers on 4.
        orders_out, self._orders = os.pipe()
        self._answers, answers_in = os.pipe()
        options = (
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={self._profile}",
            "--remote-debugging-pipe", "about:blank",
        )  # fmt: skip
        redirect = 'exec "$@" 3<&"$IN" 4>&"$OUT"'
        try:
            self._process = subprocess.Popen(
                ["bash", "-c", redirect, "browser", path, *options], pass_fds=(orders_out, answers_in),
                env={**os.environ, "IN": str(orders_out), "OUT": str(answers_in), "HOME": self._profile},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(orders_out)
            os.close(answers_in)
        self._session = ""
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self._call("Page.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser. Idempotent."""
        if self._orders < 0:
            return
        os.close(self._orders)  # the end of the pipe is the end of the browser
        os.close(self._answers)
        self._orders = self._answers = -1
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def resize(self, width: int, height: int, *, mobile: bool = False, dark: bool = False) -> None:
        """Be a screen of this size, in CSS pixels, as of a phone if ``mobile``."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page."""
        self._call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """What a JavaScript expression is worth on the page.

        Raises:
            RuntimeError: it throws.
        """
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Ask until the answer is true.

        Raises:
            TimeoutError: it never is.
        """
        deadline = time.monotonic() + self._timeout_s
        while not (found := self.ask(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script} is {found!r} after {self._timeout_s} s")
            time.sleep(0.1)
        return found

    def picture(self) -> bytes:
        """The page as it is seen, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        order: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_s
        while (answer := self._receive(deadline, method)).get("id") != number:
            pass  # an event
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise TimeoutError(f"{method}: no answer from the browser in {self._timeout_s} s")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise TimeoutError(f"{method}: the browser has ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
