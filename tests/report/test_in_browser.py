"""Every page in a headless Chromium, at the widths of phones and screens, light and dark. Skipped without a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.report.browser import NAMES, Browser, browser, executable
from tests.report.pages import PAGES

pytestmark = pytest.mark.long

WIDTHS = (320, 768, 1600)
# The elements that have a text of their own and are visible: [text, left, top, right, bottom, font size, in a picture].
TEXTS = """
const texts = () => [...document.querySelectorAll("body *")].filter(one =>
  [...one.childNodes].some(child => child.nodeType === 3 && child.data.trim()) && one.checkVisibility()
  && !["title", "desc"].includes(one.localName) && !one.closest(".scroll"));
const rectangle = one => { const range = document.createRange(); range.selectNodeContents(one);
  return range.getBoundingClientRect(); };
"""
PLACES = """ texts().map(one => { const at = rectangle(one), svg = one.ownerSVGElement;
  const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
  const size = scale * parseFloat(getComputedStyle(one).fontSize);
  return [one.textContent.trim(), at.left, at.top, at.right, at.bottom, size, !!svg];
})"""
# The least contrast of a text with what is under its middle, as WCAG 2 defines it.
LUMINANCE = """
const paper = getComputedStyle(document.body).backgroundColor;
const luminance = colour => { const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)
  .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; };
const under = one => { const at = rectangle(one);
  const found = document.elementsFromPoint((at.left + at.right) / 2, (at.top + at.bottom) / 2)
    .find(other => other.localName === "path" && getComputedStyle(other).fill.startsWith("rgb"));
  return found ? getComputedStyle(found).fill : paper; };
"""
CONTRAST = """ texts().map(one => { const svg = one.ownerSVGElement, style = getComputedStyle(one);
  const both = [luminance(svg ? style.fill : style.color), luminance(svg ? under(one) : paper)];
  return [one.textContent.trim(), (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05)];
}).sort((a, b) => a[1] - b[1])[0]"""


def places(page: Browser) -> list[Any]:
    return list(page.evaluate(f"(() => {{ {TEXTS} return {PLACES}; }})()"))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = executable()
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module", params=PAGES)
def shown(request: pytest.FixtureRequest, opened: Browser, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """The browser, with one of the pages."""
    file = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    file.write_text(PAGES[request.param]().html(), encoding="utf-8")
    opened.show(file)
    return opened


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_width_and_no_text_covers_another(shown: Browser, width: int) -> None:
    shown.resize(width, 800)
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    found = places(shown)
    assert len(found) > 20
    outside = [text for text, left, _, right, *_ in found if left < -0.5 or right > width + 0.5]
    assert outside == []
    tiny = [(text, size) for text, *_, size, _ in found if size < 8.5]
    assert tiny == []
    for number, (text, left, top, right, bottom, _, picture) in enumerate(found):
        for other, left_, top_, right_, bottom_, _, picture_ in found[number + 1 :]:
            if picture and picture_:
                apart = right <= left_ + 1 or right_ <= left + 1 or bottom <= top_ + 3 or bottom_ <= top + 3
                assert apart, f"{text!r} and {other!r}"


@pytest.mark.parametrize(("width", "height"), [(320, 568), (360, 640), (1280, 720)])
def test_the_first_screen_has_the_headline_which_is_the_largest_text(shown: Browser, width: int, height: int) -> None:
    shown.resize(width, height)
    found = places(shown)
    figure = shown.evaluate("document.querySelector('.headline strong').textContent")
    largest = max(size for *_, size, _ in found)
    assert [text for text, *_, size, _ in found if size == largest] == [figure]
    assert shown.evaluate("document.querySelector('.headline').getBoundingClientRect().bottom") < 0.75 * height


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_text_has_contrast_in_light_and_dark(shown: Browser, width: int, dark: bool) -> None:
    shown.resize(width, 800, dark=dark)
    shown.resize(width, shown.evaluate("document.documentElement.scrollHeight"), dark=dark)  # all of it can be hit
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    text, contrast = shown.evaluate(f"(() => {{ {TEXTS} {LUMINANCE} return {CONTRAST}; }})()")
    assert contrast >= 4.5, text


def test_a_pointer_over_a_picture_shows_the_values_there(shown: Browser) -> None:
    shown.resize(1280, 800)
    shown.resize(1280, shown.evaluate("document.documentElement.scrollHeight"))
    titles = shown.evaluate("""[...document.querySelectorAll("svg")].filter(one => one.checkVisibility()).map(svg => {
      const marks = [...svg.querySelectorAll("rect > title")];
      const at = marks[Math.floor(marks.length / 2)].parentNode.getBoundingClientRect();
      const top = document.elementFromPoint((at.left + at.right) / 2, (at.top + at.bottom) / 2);
      return top.querySelector("title")?.textContent ?? ""; })""")
    assert titles and all(any(letter.isdigit() for letter in title) for title in titles), titles
