"""Takes screenshots of the first screen of pages, at 1,280 and 360 px, light and dark, to look at.

python -m tests.report.screens page.html ... FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.report.browser import NAMES, browser, executable

SIZES = ((1280, 800), (360, 740))


def main(arguments: list[str]) -> None:
    *pages, folder = map(Path, arguments)
    program = executable()
    assert program is not None, f"none of {', '.join(NAMES)} is installed"
    with TemporaryDirectory() as profile, browser(program, Path(profile)) as opened:
        for page in pages:
            opened.show(page)
            for width, height in SIZES:
                for scheme in ("light", "dark"):
                    opened.resize(width, height, dark=scheme == "dark")
                    opened.screenshot(folder / f"{page.stem}-{width}-{scheme}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
