"""Chromium without a window: how pages are laid out, what they say and what they ask for.

- `Browser`: opens pages of some width, in light or dark, evaluates scripts in them and takes pictures.
- `needed`: marks a test that opens pages; without a browser it is skipped.
- `LAYOUT`: a script that names what is wrong with the layout: overflow, titles that overlap, contrast that is too low.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
needed = pytest.mark.skipif(PROGRAM is None, reason="no browser on this machine: apt-get install chromium")
WIDTHS = (360, 768, 1300, 2000)
# What the browser says where the page that was asked is gone.
LEFT = ("Inspected target navigated", "Execution context was destroyed", "Cannot find context", "Promise was collected")

LAYOUT = """
(() => {
  const wrong = [];
  const name = (e) => `${e.tagName.toLowerCase()} ${e.id} "${(e.textContent || "").trim().slice(0, 30)}"`;
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`the page is ${root.scrollWidth} wide, of ${root.clientWidth}`);
  const shown = [...document.body.querySelectorAll("*")].filter((e) =>
    e.getClientRects().length && !e.closest("svg svg, script, style"));
  const scrolls = (e) => {
    for (let p = e.parentElement; p; p = p.parentElement) {
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return true;
    }
    return false;
  };
  for (const e of shown) {
    const box = e.getBoundingClientRect();
    if ((box.right > root.clientWidth + 1 || box.left < -1) && !scrolls(e)) wrong.push(`${name(e)} leaves the page`);
    const isWide = e.matches("caption") && e.getClientRects()[0].width > root.clientWidth;
    if (isWide) wrong.push(`${name(e)} is wider than the page`);
    const hides = getComputedStyle(e).overflowX === "hidden";
    if (hides && e.scrollWidth > e.clientWidth + 1) wrong.push(`${name(e)} is cut`);
  }
  const titles = shown.filter((e) => e.matches("h1, h2, h3, dt, dd, th, legend, label, li, caption, summary"));
  const boxes = titles.map((e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    return range.getBoundingClientRect();
  });
  for (let i = 0; i < titles.length; i++) {
    for (let j = i + 1; j < titles.length; j++) {
      if (titles[i].contains(titles[j]) || scrolls(titles[i]) !== scrolls(titles[j])) continue;
      const [a, b] = [boxes[i], boxes[j]];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 2) wrong.push(`${name(titles[i])} overlaps ${name(titles[j])}`);
    }
  }
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parse = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (e) => {
    for (let p = e; p; p = p.parentElement) {
      const color = parse(getComputedStyle(p).backgroundColor);
      if (color[3] === 255) return color;
    }
    return parse("Canvas");
  };
  for (const e of shown) {
    const writes = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!writes) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) wrong.push(`${name(e)} has a contrast of ${contrast.toFixed(2)}`);
  }
  return [...new Set(wrong)].slice(0, 20);
})()
"""


class Browser:
    """A browser with one page, driven over a pipe; a context manager.

    Attributes:
      complaints: errors and warnings of the page.
      asked: addresses that the page asked for, other than files and data.
    """

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        to_read, self._to_write = os.pipe()
        self._to_hear, to_say = os.pipe()
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
        command = [PROGRAM, *options, "--disable-component-update", f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec 3<&{to_read} 4>&{to_say}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command, "--remote-debugging-pipe"],
            pass_fds=(to_read, to_say),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_say)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.loads = 0
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to_write)  # the browser ends when its pipe does
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            os.close(self._to_hear)

    def open(self, page: Path | str, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Opens a page, and returns when it is drawn."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        address = page.absolute().as_uri() if isinstance(page, Path) else page
        before = self.loads
        self._call("Page.navigate", url=address)
        self.wait_for_load(before)

    def wait_for_load(self, before: int) -> None:
        """Waits until a page has been loaded since there were so many loads."""
        while self.loads == before:
            self._hear()
        self.evaluate("new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(() => resolve(1))))")

    def evaluate(self, script: str) -> Any:
        """The value of a script in the page; a promise is waited for.

        A page that loads itself again while it is asked does not answer: the page that follows is asked the same.
        """
        message = {"expression": script, "returnByValue": True, "awaitPromise": True}
        while "error" in (answer := self._ask("Runtime.evaluate", **message)):
            assert any(text in answer["error"]["message"] for text in LEFT), answer["error"]
        assert "exceptionDetails" not in answer["result"], answer["result"]
        return answer["result"]["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, path: Path, whole: bool = True) -> None:
        """A picture of the page, or of what fits on the screen."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def tree(self) -> list[dict[str, Any]]:
        """The nodes that a screen reader reads."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]

    def _call(self, method: str, **parameters: Any) -> Any:
        answer = self._ask(method, **parameters)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer, with a "result" or an "error"."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == number:
                return answer

    def _hear(self) -> dict[str, Any]:
        """The next message, noted where it is an event."""
        while b"\0" not in self._buffer:
            part = os.read(self._to_hear, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self.loads += 1
            case "Runtime.exceptionThrown":
                self.complaints.append(parameters["exceptionDetails"].get("exception", {}).get("description", "?"))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(str([argument.get("value") for argument in parameters["args"]]))
            case "Log.entryAdded":
                self.complaints.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith(("file:", "data:")):
                self.asked.append(parameters["request"]["url"])
        return message
