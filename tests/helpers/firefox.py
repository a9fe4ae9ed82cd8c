"""A Firefox without a window, driven by its own protocol, Marionette: the distribution's, which Playwright cannot drive."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key of a reference to an element in WebDriver's format."""
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Shift": "\ue008"}
PREFERENCES: dict[str, Any] = {
    "marionette.port": 0,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
    "browser.startup.homepage_override.mstone": "ignore",
    "browser.aboutwelcome.enabled": False,
}


class Firefox:
    """A browser with an empty profile. Commands are those of WebDriver."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("firefox-esr") or shutil.which("firefox")
        assert found, "no Firefox was found: install one (Debian: apt install firefox-esr)"
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
        (folder / "user.js").write_text("\n".join(lines), encoding="utf-8")
        command = [
            found,
            "--headless",
            "--marionette",
            "--no-remote",
            "-remote-allow-system-access",
            "--profile",
            str(folder),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port, until = folder / "MarionetteActivePort", time.monotonic() + 60
        while not (port.exists() and port.read_text(encoding="utf-8").strip()):
            assert self._process.poll() is None and time.monotonic() < until, "Firefox has not started"
            time.sleep(0.1)
        self._socket = socket.create_connection(("127.0.0.1", int(port.read_text(encoding="utf-8"))), timeout=90)
        self._stream, self._count = self._socket.makefile("rb"), 0
        self._receive()
        self.send("WebDriver:NewSession", capabilities={"alwaysMatch": {"timeouts": {"script": 60_000}}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)

    def _receive(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            length += self._stream.read(1)
        return json.loads(self._stream.read(int(length[:-1])))

    def send(self, command: str, **parameters: Any) -> Any:
        """The result of a command."""
        self._count += 1
        text = json.dumps([0, self._count, command, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(text), text))
        _, _, error, result = self._receive()
        assert error is None, error
        return result["value"] if isinstance(result, dict) and set(result) == {"value"} else result

    def goto(self, url: str) -> None:
        self.send("WebDriver:Navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        return self.send("WebDriver:ExecuteScript", script=f"return ({expression});", args=[])

    def expect(self, expression: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click where an element is, as a user does: it has to be visible and uncovered."""
        found = self.send("WebDriver:FindElement", using="css selector", value=selector)
        self.send("WebDriver:ElementClick", id=found[ELEMENT])

    def press(self, *keys: str) -> None:
        """Press keys by names, such as "Tab" or "Shift+Tab", or type a text, where the focus is."""
        actions = []
        for key in keys:
            names = key.split("+")
            chords = [[KEYS[one] for one in names]] if set(names) <= set(KEYS) else [[one] for one in key]
            for chord in chords:
                actions += [{"type": "keyDown", "value": one} for one in chord]
                actions += [{"type": "keyUp", "value": one} for one in reversed(chord)]
        self.send("WebDriver:PerformActions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def look(self, width: int, height: int, scheme: str) -> None:
        """Give the page a size and a colour scheme. A window cannot be as narrow as a phone, its contents can."""
        bars = self.evaluate("outerHeight - innerHeight")
        self.send("WebDriver:SetWindowRect", width=max(width, 450), height=height + bars)
        self.send("Marionette:SetContext", value="chrome")
        script = """const [width, scheme] = arguments, { style } = gBrowser.selectedBrowser;
            style.setProperty("max-width", `${width}px`, "important");
            Services.prefs.setIntPref("layout.css.prefers-color-scheme.content-override", scheme);"""
        self.send("WebDriver:ExecuteScript", script=script, args=[width, ("dark", "light").index(scheme)])
        self.send("Marionette:SetContext", value="content")
        self.expect(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")

    def save(self, path: Path) -> None:
        """Write a screenshot."""
        path.write_bytes(base64.b64decode(self.send("WebDriver:TakeScreenshot", full=False, hash=False)))
