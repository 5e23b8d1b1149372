"""Checks the documentation in a real browser: no page is wider than its window at 1,300 and 480 pixels. Tables and code may scroll.

python scripts/check_site.py [--shots FOLDER] [PAGE ...]

Needs Chromium or Chrome on the PATH, or its path in CHROMIUM. Run `mkdocs build` first. PAGE is a path such as `index.html`; without one, all
pages of build/site are checked. Exit code 1 if a page is too wide.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from browser import Browser, find_browser

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
WIDTHS = (1300, 480)
# The page's horizontal overflow, and the elements beyond its edge that no scrolling parent contains.
WIDER = """(() => {
  const own = (one) => /auto|scroll|hidden/.test(getComputedStyle(one).overflowX);
  const scrolls = (one) => one && one !== document.body && (own(one) || scrolls(one.parentElement));
  const outside = (one) => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one);
  const out = [...document.querySelectorAll('.md-content *')].filter(outside);
  return [document.documentElement.scrollWidth - innerWidth, out.slice(0, 3).map((one) => one.outerHTML.slice(0, 90))];
})()"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="paths below build/site")
    parser.add_argument("--shots", type=Path, help="folder for screenshots")
    given = parser.parse_args()
    browser = find_browser()
    if browser is None:
        return 2
    pages = [SITE / name for name in given.pages] or sorted(SITE.rglob("*.html"))
    if not pages:
        print(f"{SITE} has no page: run `mkdocs build` first", file=sys.stderr)
        return 2
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        tab = Browser(browser, profile=Path(scratch))
        for page in pages:
            name = page.relative_to(SITE).with_suffix("").as_posix()
            for width in WIDTHS:
                tab.open(page, width=width, dark=False)
                excess, elements = tab.evaluate(WIDER)
                if excess > 0 or elements:
                    faults.append(f"{name} at {width}: {excess} pixels too wide {elements}")
                if given.shots:
                    given.shots.mkdir(parents=True, exist_ok=True)
                    tab.shoot(given.shots / f"{name.replace('/', '_')}_{width}.png")
        tab.close()
    print("\n".join(faults) or f"{len(pages)} pages without a fault")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
