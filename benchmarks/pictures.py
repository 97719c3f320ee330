"""The pictures of docs/images that show a run: its dashboard, light and dark, while it goes on and heals, and its report.

    python -m benchmarks.pictures [--out docs/images]      # needs playwright (extra dev), and its Chromium or the system's

A real run under a schedule of `everstep chaos` (of real processes on this machine), looked at through its dashboard with a headless
browser. The history of the run is checked before anything is kept.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.circumstances import ROOT
from everstep.chaos import with_schedule
from everstep.config.load import load_config
from everstep.recovery.chaos import parse_kinds
from everstep.telemetry.history import check, worst
from everstep.telemetry.status import status

SIZE = {"width": 1280, "height": 860}


def browser_of(playwright: Any) -> Any:
    path = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def shoot(browser: Any, address: str, picture: Path, scheme: str, whole: bool = False) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("body[data-drawn]")
    page.screenshot(path=str(picture), full_page=whole)
    page.close()


def _watch(folder: Path, out: Path, after: int, over: threading.Event, shot: set[str]) -> None:
    """The last moment in which a replica was out or healed, in both themes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = browser_of(playwright)
        while not over.wait(0.2):
            if not (folder / "status.json").exists():
                continue
            now = status(folder)
            if now.dashboard and now.live and now.committed_step > after and (now.unavailable or now.healing):
                for scheme in ("light", "dark"):
                    shoot(browser, now.dashboard, out / f"dashboard-{scheme}.png", scheme)
                    shot.add(scheme)
        browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    from everstep.cluster.forked import ForkedHost
    from everstep.driver import run
    from everstep.telemetry.dashboard.report import write
    from everstep.telemetry.dashboard.story import tell

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs" / "chaos"
        config = with_schedule(load_config(str(ROOT / "examples" / "sft_text.yaml"), [
            "device=cpu", f"model.path={ROOT}/examples/models/tiny-qwen3", "layout.replicas=3", "layout.tp=2", "layout.spares=2", f"sft.steps={args.steps}",
            "sft.samples_per_step=60", "checkpoint.every_steps=30", "train.verify_every=20", "recovery.silence_s=3", "recovery.heartbeat_s=0.3",
            "telemetry.dashboard=true", f"run_dir={folder}",
        ]), args.seed, 4.0 / args.steps, parse_kinds("kill,exit,stop", False), False)
        over, shot = threading.Event(), set[str]()
        watcher = threading.Thread(target=_watch, args=(folder, Path(temporary), args.steps // 3, over, shot))
        watcher.start()
        try:
            run(config, host=ForkedHost)
        finally:
            over.set()
            watcher.join()
        if worst(check(folder)):
            raise SystemExit(f"the run in {folder} went wrong: see everstep verify")
        if len(shot) < 2:
            raise SystemExit(f"nothing was out of service after step {args.steps // 3}; choose another --seed")
        written = write(tell(folder))
        with sync_playwright() as playwright:
            browser = browser_of(playwright)
            shoot(browser, written[0].as_uri(), Path(temporary) / "report.png", "light", whole=True)
            browser.close()
        args.out.mkdir(parents=True, exist_ok=True)
        for picture in (Path(temporary) / "dashboard-light.png", Path(temporary) / "dashboard-dark.png", Path(temporary) / "report.png", folder / "report" / "time.png"):
            print(shutil.copy(picture, args.out / ("report_time.png" if picture.name == "time.png" else picture.name)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
